"""A pack: documents side by side in one row of tokens, and the batch the drafter trains on.

Everything is flat and padded to lengths that repeat, so that compiled code sees few shapes. Padding is its own
document at the end: nothing sees it, nothing is asked of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from peagle.train.data.attention_mask import BLOCK, MOST_DEPTHS, Blocks, RowSet, blocks_of
from peagle.train.data.chains import Chains, room_of


@dataclass(frozen=True, slots=True)
class Pack:
    """T tokens of several documents."""

    ids: np.ndarray  # [T]
    doc: np.ndarray  # [T] number of the document in this pack; padding has the highest
    start: np.ndarray  # [T] the first index of its document
    position: np.ndarray  # [T] within its document
    answer: np.ndarray  # [T] bool: written by the target
    lengths: np.ndarray  # [documents]
    chosen: np.ndarray | None = None  # [documents] their numbers among all documents
    source: np.ndarray | None = None  # [T] where each token lies among all documents' tokens

    @property
    def room(self) -> np.ndarray:
        return room_of(self.doc, self.answer)


def pack(documents: list[tuple[np.ndarray, np.ndarray]], tokens: int = 0) -> Pack:
    """documents: (ids, answer) each. Padded with zeros to `tokens`, or else to whole blocks."""
    lengths = np.array([len(ids) for ids, _ in documents])
    total = int(lengths.sum())
    size = max(tokens, total)
    size += -size % BLOCK
    more = size - total
    sizes = np.append(lengths, more)
    return Pack(
        ids=np.concatenate([*(ids for ids, _ in documents), np.zeros(more, dtype=np.int64)]).astype(
            np.int64
        ),
        doc=np.repeat(np.arange(len(documents) + 1), sizes),
        start=np.repeat(np.cumsum(sizes) - sizes, sizes),
        position=np.concatenate([np.arange(n) for n in [*lengths.tolist(), more]]),
        answer=np.concatenate(
            [*(answer for _, answer in documents), np.zeros(more, dtype=bool)]
        ).astype(bool),
        lengths=lengths,
    )


@dataclass(frozen=True, slots=True)
class Level:
    """Chain rows that run in one pass: all depths for P-EAGLE, one depth for EAGLE-3. Padding lies behind."""

    rows: RowSet  # [R]
    positions: Tensor  # [R] RoPE
    ids: Tensor  # [R] the token before the one it drafts: EAGLE-3 embeds it, a dependency corrects by it; -1: not told
    parent: (
        Tensor  # [R] the row before in its chain: its place in the level before, or in the context
    )
    live: int  # the first so many rows are no padding
    blocks: Blocks | None = None  # of its attention, for flex


@dataclass(frozen=True, slots=True)
class Segment:
    levels: tuple[Level, ...]
    edge: int  # how many context rows its chains may see


@dataclass(frozen=True, slots=True)
class Batch:
    """A pack with its sampled chains. Tensors are int32."""

    ids: Tensor  # [T]
    next_ids: Tensor  # [T] ids shifted by one: what row p embeds
    position: Tensor  # [T]
    lengths: tuple[int, ...]  # of the documents
    chosen: np.ndarray | None  # their numbers among all documents
    source: Tensor | None  # [T] where each token lies among all documents' tokens
    context: RowSet  # [T] depth 0
    supervised: Tensor  # [n] the context rows that have a loss
    segments: tuple[Segment, ...]
    blocks: Blocks | None = None  # of the context's attention, for flex

    @property
    def rows(self) -> int:
        """Supervised rows of every depth: what the loss is divided by."""
        return len(self.supervised) + sum(
            level.live for segment in self.segments for level in segment.levels
        )


def batch_of(
    packed: Pack,
    chains: Chains,
    by_depth: bool = False,
    segments: int = 1,
    capacity: list[int] | None = None,
    flex: bool = False,
    bidirectional: bool = False,
) -> Batch:
    """Chains go to the segment of anchor + 1. `by_depth`: a level a depth (EAGLE-3). `bidirectional`: the rows of a
    chain all see each other.

    `capacity`: rows of each level, so that shapes repeat; without it a level is padded to whole blocks.
    """
    size = len(packed.ids)
    context = _rows(packed.doc, packed.start, np.arange(size), np.zeros(size), np.zeros(size))
    parts = []
    for left, right in pairwise([size * s // segments for s in range(segments + 1)]):
        inside = (chains.anchor + 1 >= left) & (chains.anchor + 1 < right)
        own = chains[inside]
        if len(own):
            edge = min(size, right + -right % BLOCK)
            levels = _levels(packed, own, by_depth, capacity, bidirectional)
            parts.append(
                Segment(tuple(_with_blocks(levels, context[:edge])) if flex else levels, edge)
            )
    return Batch(
        ids=_int(packed.ids),
        next_ids=_int(np.append(packed.ids[1:], 0)),
        position=_int(packed.position),
        lengths=tuple(packed.lengths.tolist()),
        chosen=packed.chosen,
        source=None if packed.source is None else _int(packed.source),
        context=context,
        supervised=_int(np.flatnonzero(packed.room)),
        segments=tuple(parts),
        blocks=blocks_of(context, context) if flex else None,
    )


def _int(x: np.ndarray) -> Tensor:
    return torch.from_numpy(x.astype(np.int32))


def _rows(*fields: np.ndarray) -> RowSet:
    return RowSet(*map(_int, fields))


def _with_blocks(levels: tuple[Level, ...], seen: RowSet) -> Iterator[Level]:
    for level in levels:
        seen = seen + level.rows
        yield replace(level, blocks=blocks_of(level.rows, seen))


def _levels(
    packed: Pack, chains: Chains, by_depth: bool, capacity: list[int] | None, bidirectional: bool
) -> tuple[Level, ...]:
    if not by_depth:
        parent = np.zeros_like(chains.anchor)
        return (_level(packed, chains, parent, capacity[0] if capacity else 0, bidirectional),)
    levels, before = [], np.arange(len(packed.ids))
    for depth in range(1, int(chains.depth.max()) + 1):
        own = chains[chains.depth == depth]
        parent = np.searchsorted(before, own.anchor)
        levels.append(
            _level(packed, own, parent, capacity[depth - 1] if capacity else 0, bidirectional)
        )
        before = own.anchor
    return tuple(levels)


def _level(
    packed: Pack, chains: Chains, parent: np.ndarray, capacity: int, bidirectional: bool
) -> Level:
    """Padding has a document of its own and anchors of its own: each such row sees itself alone."""
    live, size = len(chains), len(packed.ids)
    more = max(capacity - live, 0)
    more += -(live + more) % BLOCK
    after = np.minimum(chains.anchor + chains.depth + 1, size - 1)
    before = (
        packed.ids[after] if chains.told is None else np.where(chains.told, packed.ids[after], -1)
    )
    sees = np.full(live, MOST_DEPTHS - 1) if bidirectional else chains.depth
    nothing, own = np.zeros(more, dtype=np.int64), size + np.arange(more)
    return Level(
        rows=_rows(
            np.append(packed.doc[chains.anchor], nothing + int(packed.doc[-1]) + 1),
            np.append(packed.start[chains.anchor], own + 1),  # behind its anchor: no context
            np.append(chains.anchor, own),
            np.append(chains.depth, nothing + 1),
            np.append(sees, nothing + 1),
        ),
        positions=_int(np.append(packed.position[chains.anchor] + chains.depth, nothing)),
        ids=_int(np.append(before, nothing)),
        parent=_int(np.append(parent, nothing)),
        live=live,
    )
