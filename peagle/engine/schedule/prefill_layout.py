"""Chunks of prompts side by side, laid out by the host: one vector of numbers, one transfer to the device.

The target's rows are the chunks' tokens. The drafter's are the same positions with ids shifted by one (the id after a
chunk's last is known, or what the target is about to say), and behind a chunk that ends its prompt, mask rows. A layout
may be larger than what is in it, so that shapes repeat and a CUDA graph fits: the rest is nobody's.

    chunk 10 11 12 at positions 5..7, the next id 13, 2 mask rows:

    target   id 10 11 12      position 5 6 7
    drafter  id 11 12 13 M M  position 5 6 7 8 9   source 0 1 2 -1 -1
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from peagle.engine.schedule.request import PrefillChunk

MASK, DEAD = -1, -2  # sources of rows that are no token's
NEWEST = -1  # the id after a chunk: known by then, or what the target says


@dataclass(frozen=True, slots=True)
class Size:
    rows: int  # of the target's pass
    requests: int
    masks: int  # the most behind a chunk
    most: int  # rows of one request
    everywhere: bool = False  # mask rows behind every chunk, not those alone that end a prompt

    @property
    def wide(self) -> int:
        """Rows of the drafter's pass."""
        return self.rows + self.requests * self.masks


def parts_of(size: Size) -> dict[str, int]:
    """The names of the vector's parts, in order, and how long each is."""
    rows, wide, each = size.rows, size.wide, size.requests
    return (
        dict.fromkeys(("ids", "positions", "owner"), rows)
        | dict.fromkeys(("next_ids", "wide_positions", "wide_owner", "source"), wide)
        | dict.fromkeys(("place", "start", "count", "first", "last", "end"), each)
        | dict.fromkeys(("wide_start", "wide_count", "wide_last", "known", "emitted"), each)
    )


def numbers_of(chunks: list[PrefillChunk], at: list[int], size: Size, nobody: int) -> list[int]:
    """`at`: the chunks' places; `nobody`: the place of requests that fill the layout up."""
    parts: dict[str, list[int]] = {name: [] for name in parts_of(size)}
    for b, (chunk, place) in enumerate(zip(chunks, at, strict=True)):
        ids, next_id = chunk.ids, chunk.next_id
        count, masks = (
            len(ids),
            size.masks if size.everywhere or chunk.end == chunk.request.goal else 0,
        )
        row, wide = len(parts["ids"]), len(parts["next_ids"])
        parts["ids"] += ids
        parts["positions"] += range(chunk.start, chunk.end)
        parts["owner"] += [b] * count
        parts["next_ids"] += [*ids[1:], NEWEST] + [0] * masks
        parts["wide_positions"] += range(chunk.start, chunk.end + masks)
        parts["wide_owner"] += [b] * (count + masks)
        parts["source"] += [*range(row, row + count)] + [MASK] * masks
        each = {
            "place": place,
            "start": row,
            "count": count,
            "first": chunk.start,
            "last": row + count - 1,
            "end": chunk.end,
            "wide_start": wide,
            "wide_count": count + masks,
            "wide_last": wide + count - 1,
            "known": NEWEST if next_id is None else next_id,
            "emitted": max(1, len(chunk.request.output)),
        }
        for name, number in each.items():
            parts[name].append(number)
    fill = {"owner": -1, "wide_owner": -1, "source": DEAD, "place": nobody}
    numbers: list[int] = []
    for name, length in parts_of(size).items():
        numbers += parts[name] + [fill.get(name, 0)] * (length - len(parts[name]))
    return numbers


def views_of(vector: Tensor, size: Size) -> dict[str, Any]:
    """The parts of the vector, each a view of it."""
    views, start = {}, 0
    for name, length in parts_of(size).items():
        views[name] = vector[start : start + length]
        start += length
    return views
