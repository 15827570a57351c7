"""A pack of documents in one sequence of tokens, and the batch on which the drafter trains.

Everything is flat and padded to lengths that repeat, so that compiled code sees few shapes. Padding
is a document of its own at the end: no other row sees it, and it has no loss.

Worked example: a document of 6 tokens, answer = tokens 2..5, P-EAGLE with K = 3 and no row dropped.
Context rows are 0..5 (depth 0), of which 0..3 are supervised; chain rows are written anchor.depth.

    row        0    1    2    3    4    5  |  0.1  0.2  1.1  1.2  2.1
    embeds     x1   x2   x3   x4   x5   -  |  mask embedding
    hidden     g0   g1   g2   g3   g4   g5 |  mask_hidden
    position   0    1    2    3    4    5  |  1    2    2    3    3
    predicts   x2   x3   x4   x5   -    -  |  x3   x4   x4   x5   x5
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from peagle.train.data.attention_mask import (
    BLOCK_SIZE,
    BlockLists,
    RowSet,
    build_block_lists,
)
from peagle.train.data.chains import MAX_DEPTHS, Chains, max_chain_lengths


@dataclass(frozen=True, slots=True)
class PackedDocuments:
    """T tokens of several documents."""

    ids: np.ndarray  # [T]
    doc: np.ndarray  # [T] index of the document in this pack; padding has the highest
    doc_start: np.ndarray  # [T] first index of the token's document
    position: np.ndarray  # [T] within the document
    answer_mask: np.ndarray  # [T] bool: written by the target
    lengths: np.ndarray  # [documents]
    document_indices: np.ndarray | None = None  # [documents] index among all documents
    token_indices: np.ndarray | None = None  # [T] index among all documents' tokens

    @property
    def max_chain_lengths(self) -> np.ndarray:
        """[T] the longest chain at each position; 0 where the row is not supervised."""
        return max_chain_lengths(self.doc, self.answer_mask)


def pack_sequences(
    sequences: Sequence[tuple[np.ndarray, np.ndarray]], tokens: int = 0
) -> PackedDocuments:
    """Pack (ids, answer_mask) pairs, padded with zeros to `tokens` and to whole blocks."""
    lengths = np.array([len(ids) for ids, _ in sequences])
    total = int(lengths.sum())
    size = _round_up(max(tokens, total))
    padding = size - total
    sizes = np.append(lengths, padding)
    ids = [*(ids for ids, _ in sequences), np.zeros(padding, dtype=np.int64)]
    masks = [*(mask for _, mask in sequences), np.zeros(padding, dtype=bool)]
    return PackedDocuments(
        ids=np.concatenate(ids).astype(np.int64),
        doc=np.repeat(np.arange(len(sequences) + 1), sizes),
        doc_start=np.repeat(np.cumsum(sizes) - sizes, sizes),
        position=np.concatenate([np.arange(n) for n in sizes.tolist()]),
        answer_mask=np.concatenate(masks).astype(bool),
        lengths=lengths,
    )


@dataclass(frozen=True, slots=True)
class ChainLevel:
    """Chain rows that run in one pass: all depths for P-EAGLE, one depth for EAGLE-3.

    Padding rows are last.
    """

    rows: RowSet  # [R]
    positions: Tensor  # [R] for RoPE
    # [R] the token before the one that the row drafts: EAGLE-3 embeds it, the dependency head
    # corrects the row by it; -1 leaves the row uncorrected.
    previous_ids: Tensor
    # [R] index of the previous row of the chain, in the previous level or in the context
    parent: Tensor
    num_unpadded: int  # rows before the padding
    block_lists: BlockLists | None = None  # of its attention, for flex attention
    refinement_lists: BlockLists | None = None  # of its attention inside blocks, if it is refined


@dataclass(frozen=True, slots=True)
class Segment:
    """Chains that run together; the segments of a pack run one after the other to save memory.

    S segments split the T positions at T * s // S. The chain of anchor a, all its depths, belongs
    to the segment that holds a + 1; it sees the context rows up to the right edge of that segment.
    """

    levels: tuple[ChainLevel, ...]
    context_length: int  # number of context rows that its chains may see


@dataclass(frozen=True, slots=True)
class Batch:
    """A pack with its sampled chains. Tensors are int32."""

    ids: Tensor  # [T]
    next_ids: Tensor  # [T] ids shifted by one: row p embeds token p + 1
    positions: Tensor  # [T] for RoPE
    lengths: tuple[int, ...]  # of the documents
    document_indices: np.ndarray | None  # [documents] index among all documents
    token_indices: Tensor | None  # [T] index among all documents' tokens
    context: RowSet  # [T] depth 0
    supervised: Tensor  # [n] the context rows that have a loss
    segments: tuple[Segment, ...]
    # For flex attention: the blocks of the target's attention, and of the drafter's if it differs.
    block_lists: BlockLists | None = None
    window_block_lists: BlockLists | None = None

    @property
    def drafter_block_lists(self) -> BlockLists | None:
        """The blocks of the drafter's attention among the context rows."""
        return self.window_block_lists or self.block_lists

    @property
    def num_supervised(self) -> int:
        """Supervised rows of every depth: the loss is divided by this number."""
        levels = (level for segment in self.segments for level in segment.levels)
        return len(self.supervised) + sum(level.num_unpadded for level in levels)


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How the chains of a pack are laid out."""

    by_depth: bool = False  # one level for each depth (EAGLE-3), or one for all (P-EAGLE)
    segments: int = 1
    # Rows of each level, so that shapes repeat; without it a level is padded to whole blocks.
    level_sizes: tuple[int, ...] | None = None
    flex: bool = False  # build the block lists of flex attention
    bidirectional: bool = False  # all rows of a chain see each other
    window: int | None = None  # sliding window of the drafter, in positions
    refinement: bool = False  # the drafter has a refinement, which attends inside blocks


def build_batch(
    packed: PackedDocuments,
    chains: Chains,
    layout: BatchLayout = BatchLayout(),  # noqa: B008
) -> Batch:
    """Lay out the rows of a pack."""
    size = len(packed.ids)
    context = _row_set(
        packed.doc,
        packed.doc_start,
        _first_visible(packed.doc_start, np.arange(size), layout.window),
        np.arange(size),
        np.zeros(size),
        np.zeros(size),
    )
    windowed = layout.flex and layout.window is not None
    return Batch(
        ids=_int32(packed.ids),
        next_ids=_int32(np.append(packed.ids[1:], 0)),
        positions=_int32(packed.position),
        lengths=tuple(packed.lengths.tolist()),
        document_indices=packed.document_indices,
        token_indices=None if packed.token_indices is None else _int32(packed.token_indices),
        context=context,
        supervised=_int32(np.flatnonzero(packed.max_chain_lengths)),
        segments=tuple(_segments(packed, chains, context, layout)),
        block_lists=(
            build_block_lists(context.unwindowed, context.unwindowed) if layout.flex else None
        ),
        window_block_lists=build_block_lists(context, context) if windowed else None,
    )


def _first_visible(doc_start: np.ndarray, index: np.ndarray, window: int | None) -> np.ndarray:
    """The first context row that a row at `index` sees, in the coordinates of the pack."""
    return doc_start if window is None else np.maximum(doc_start, index - window + 1)


def _segments(
    packed: PackedDocuments, chains: Chains, context: RowSet, layout: BatchLayout
) -> Iterator[Segment]:
    size = len(packed.ids)
    bounds = [size * s // layout.segments for s in range(layout.segments + 1)]
    for left, right in pairwise(bounds):
        own = chains[(chains.anchor + 1 >= left) & (chains.anchor + 1 < right)]
        if not len(own):
            continue
        context_length = min(size, _round_up(right))
        levels = _levels(packed, own, layout)
        if layout.flex:
            levels = tuple(_with_block_lists(levels, context[:context_length], layout.refinement))
        yield Segment(levels, context_length)


def _with_block_lists(
    levels: tuple[ChainLevel, ...], keys: RowSet, refinement: bool
) -> Iterator[ChainLevel]:
    for level in levels:
        keys = keys + level.rows
        lists = build_block_lists(level.rows, keys)
        in_blocks = build_block_lists(level.rows.in_blocks, keys) if refinement else None
        yield replace(level, block_lists=lists, refinement_lists=in_blocks)


def _levels(packed: PackedDocuments, chains: Chains, layout: BatchLayout) -> tuple[ChainLevel, ...]:
    sizes = layout.level_sizes
    if not layout.by_depth:
        parent = np.zeros_like(chains.anchor)
        return (_level(packed, chains, parent, sizes[0] if sizes else 0, layout),)
    levels = []
    previous_anchors = np.arange(len(packed.ids))
    for depth in range(1, int(chains.depth.max()) + 1):
        own = chains[chains.depth == depth]
        parent = np.searchsorted(previous_anchors, own.anchor)
        size = sizes[depth - 1] if sizes else 0
        levels.append(_level(packed, own, parent, size, layout))
        previous_anchors = own.anchor
    return tuple(levels)


def _level(
    packed: PackedDocuments, chains: Chains, parent: np.ndarray, min_size: int, layout: BatchLayout
) -> ChainLevel:
    """Padding rows have a document and anchors of their own: each of them sees itself alone."""
    count = len(chains)
    size = len(packed.ids)
    padding = _round_up(max(min_size, count)) - count
    previous = packed.ids[np.minimum(chains.anchor + chains.depth + 1, size - 1)]
    if chains.corrected is not None:
        previous = np.where(chains.corrected, previous, -1)
    visible = np.full(count, MAX_DEPTHS - 1) if layout.bidirectional else chains.depth
    doc_start = packed.doc_start[chains.anchor]
    first_visible = _first_visible(doc_start, chains.anchor + chains.depth, layout.window)
    zeros = np.zeros(padding, dtype=np.int64)
    pad_anchors = size + np.arange(padding)
    rows = _row_set(
        np.append(packed.doc[chains.anchor], zeros + int(packed.doc[-1]) + 1),
        # The document starts behind the anchor: a padding row has no context.
        np.append(doc_start, pad_anchors + 1),
        np.append(first_visible, pad_anchors + 1),
        np.append(chains.anchor, pad_anchors),
        np.append(chains.depth, zeros + 1),
        np.append(visible, zeros + 1),
    )
    return ChainLevel(
        rows=rows,
        positions=_int32(np.append(packed.position[chains.anchor] + chains.depth, zeros)),
        previous_ids=_int32(np.append(previous, zeros)),
        parent=_int32(np.append(parent, zeros)),
        num_unpadded=count,
    )


def _round_up(size: int) -> int:
    return size + -size % BLOCK_SIZE


def _int32(x: np.ndarray) -> Tensor:
    return torch.from_numpy(x.astype(np.int32))


def _row_set(*fields: np.ndarray) -> RowSet:
    return RowSet(*map(_int32, fields))
