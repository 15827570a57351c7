"""In which order cells are measured: repeat after repeat, and within one the methods side by side.

A machine that slows down for a while then hurts every method alike, and a run that is cut short has something of all.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from peagle.results.cell import CellKey

CHAINS = (0,)  # no trees


class Turn(NamedTuple):
    repeat: int
    key: CellKey


def keys_of(
    sets: Sequence[str],
    methods: Sequence[str],
    ks: Sequence[int | str],
    concurrency: Sequence[int],
    trees: Sequence[int] = CHAINS,
) -> list[CellKey]:
    """Every cell; `none` has no K, and trees are P-EAGLE's."""
    kinds: list[tuple[str, int | str, int]] = []
    for method in methods:
        of = trees if method == "p-eagle" else CHAINS
        kinds += (
            [(method, 0, 0)] if method == "none" else [(method, k, tree) for tree in of for k in ks]
        )
    return [
        CellKey(name, method, k, c, tree)
        for name in sets
        for c in concurrency
        for method, k, tree in kinds
    ]


def order_of(keys: Sequence[CellKey], repeats: int, seed: int) -> list[Turn]:
    """Sets and concurrencies as given; the methods and K of each in an order of its own, the same every time."""
    turns: list[Turn] = []
    groups: dict[tuple[str, int], list[CellKey]] = {}
    for key in keys:
        groups.setdefault((key.set, key.concurrency), []).append(key)
    for repeat in range(repeats):
        for (name, concurrency), group in groups.items():
            chance = random.Random(f"{seed} {repeat} {name} {concurrency}")
            turns += [Turn(repeat, key) for key in chance.sample(group, len(group))]
    return turns
