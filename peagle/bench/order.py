"""The order in which cells are measured: repeat by repeat, the methods of each side by side.

A machine that slows down for a while then affects every method, and a run that is cut short has
some cells of each.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from peagle.results.key import CellKey


class ScheduledRun(NamedTuple):
    repeat: int  # from 0
    key: CellKey


def schedule_runs(keys: Sequence[CellKey], repeats: int, seed: int) -> list[ScheduledRun]:
    """Sets and concurrencies in the given order, the methods and K of each shuffled by `seed`."""
    groups: dict[tuple[str, int], list[CellKey]] = {}
    for key in keys:
        groups.setdefault((key.set, key.concurrency), []).append(key)
    schedule: list[ScheduledRun] = []
    for repeat in range(repeats):
        for (name, concurrency), group in groups.items():
            rng = random.Random(f"{seed} {repeat} {name} {concurrency}")
            schedule += [ScheduledRun(repeat, key) for key in rng.sample(group, len(group))]
    return schedule
