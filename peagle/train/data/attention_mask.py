"""The attention rule of training, as a dense mask and as the block mask of flex attention.

A row has a document, an anchor a and a depth d. Depth 0 is a position with real inputs; depth d >=
1 is the d-th mask row (P-EAGLE) or the d-th own step (EAGLE-3) after anchor a. Within a document,
query (a_q, d_q) sees key (a_k, d_k) if and only if

    (d_k == 0 and f_q <= a_k <= a_q)  or  (a_k == a_q and d_k <= v_q)

f_q is the first real row that the query sees: the first of its document or, with a sliding window
of W positions, row a_q + d_q - W + 1 if that comes later. v_q is the deepest row of its own chain
that the query sees: d_q, or the whole chain in a bidirectional block. For one anchor this is the
causal pattern of inference: all real rows up to the anchor, then the anchor's own chain, which is
never longer than a window.

    anchors 0 1 2 real, chain rows 1.1 1.2 (anchor.depth):      0  1  2  1.1  1.2
                                                        row 2   x  x  x   .    .
                                                        row 1.2 x  x  .   x    x
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from peagle.train.data.chains import MAX_DEPTHS

BLOCK_SIZE = 128  # rows of flex attention's blocks; a key block is all depth 0 or all deeper rows


@dataclass(frozen=True, slots=True)
class RowSet:
    """Rows side by side, [R] int32 each.

    Anchors are indices into the pack, so they rise with the documents.
    """

    doc: Tensor
    doc_start: Tensor  # first index of the document
    first_visible: Tensor  # first index of the context that the row sees: doc_start, or later
    anchor: Tensor
    depth: Tensor
    visible_depth: Tensor  # deepest row of its own chain that the row sees

    def __len__(self) -> int:
        return len(self.doc)

    def __add__(self, other: "RowSet") -> "RowSet":
        return RowSet(*(torch.cat(pair) for pair in zip(self.fields, other.fields, strict=True)))

    def __getitem__(self, rows: slice) -> "RowSet":
        return RowSet(*(x[rows] for x in self.fields))

    @property
    def fields(self) -> tuple[Tensor, ...]:
        return (
            self.doc,
            self.doc_start,
            self.first_visible,
            self.anchor,
            self.depth,
            self.visible_depth,
        )

    @property
    def unwindowed(self) -> "RowSet":
        """The same rows without a sliding window, as the target sees them."""
        return replace(self, first_visible=self.doc_start)

    @property
    def in_blocks(self) -> "RowSet":
        """The same rows, which see their block up to themselves: their anchor and their chain.

        A refinement attends so (drafter/refinement.py).
        """
        return replace(self, first_visible=self.anchor, visible_depth=self.depth)


Mask = Tensor | BlockMask
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # flex attention's mask_mod


def dense_mask(q: RowSet, k: RowSet) -> Tensor:
    """The rule as it is written above, [Q, K] bool."""
    same_doc = q.doc[:, None] == k.doc
    in_window = (k.anchor >= q.first_visible[:, None]) & (k.anchor <= q.anchor[:, None])
    context = (k.depth == 0) & in_window
    chain = (k.anchor == q.anchor[:, None]) & (k.depth <= q.visible_depth[:, None])
    return same_doc & (context | chain)


class BlockList(NamedTuple):
    """One list of blocks in flex attention's form, int32."""

    counts: Tensor  # [Q blocks] number of key blocks of each query block
    indices: Tensor  # [Q blocks, K blocks] those key blocks first


@dataclass(frozen=True, slots=True)
class BlockLists:
    """Blocks with visible pairs, by query block (forward pass) and by key block (backward pass)."""

    partial: BlockList
    full: BlockList
    partial_by_key: BlockList
    full_by_key: BlockList


def build_block_lists(q: RowSet, k: RowSet) -> BlockLists:
    """List the blocks with visible pairs. These are many small operations: run them on the host."""
    visible, full = classify_blocks(q, k)
    partial = visible & ~full
    return BlockLists(
        _to_block_list(partial),
        _to_block_list(full),
        _to_block_list(partial.T),
        _to_block_list(full.T),
    )


def block_mask(q: RowSet, k: RowSet, lists: BlockLists | None = None) -> BlockMask:
    """The rule for flex attention with few loads: a key is a number, a query two intervals.

    Key j of depth 0 (its index is its anchor) has the number j, a deeper key -1 - (64 a + d). A
    query sees the numbers first_visible..a_q and those of its own chain, -1 - (64 a_q + v_q)..-1 -
    64 a_q.
    """
    number = torch.where(k.depth == 0, k.anchor, _chain_number(k.anchor, k.depth))
    first_context = q.first_visible
    last_context = q.anchor
    deepest_own = _chain_number(q.anchor, q.visible_depth)
    first_own = _chain_number(q.anchor, torch.zeros_like(q.depth))

    def allowed(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        n = number[j]
        context = (n >= first_context[i]) & (n <= last_context[i])
        return context | ((n >= deepest_own[i]) & (n <= first_own[i]))

    return _to_block_mask(lists or build_block_lists(q, k), allowed, len(q), len(k))


def context_mask(rows: RowSet, lists: BlockLists | None = None) -> BlockMask:
    """The rule among rows of depth 0, whose index is their anchor: causal within the document."""
    first_visible = rows.first_visible

    def allowed(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (j >= first_visible[i])

    return _to_block_mask(lists or build_block_lists(rows, rows), allowed, len(rows), len(rows))


def build_mask(q: RowSet, k: RowSet, flex: bool, lists: BlockLists | None = None) -> Mask:
    """The mask of queries q over keys k; `lists` are the block lists if they were built ahead."""
    if not flex:
        return dense_mask(q, k)
    return context_mask(q, lists) if q is k else block_mask(q, k, lists)


def _to_block_mask(
    lists: BlockLists, allowed: MaskFunction, num_queries: int, num_keys: int
) -> BlockMask:
    partial, full, partial_by_key, full_by_key = (
        (blocks.counts[None, None], blocks.indices[None, None])  # one batch, one head
        for blocks in (lists.partial, lists.full, lists.partial_by_key, lists.full_by_key)
    )
    return BlockMask(
        (num_queries, num_keys),
        *partial,
        *full,
        *partial_by_key,
        *full_by_key,
        (BLOCK_SIZE, BLOCK_SIZE),
        allowed,
    )


def _chain_number(anchor: Tensor, depth: Tensor) -> Tensor:
    return -1 - (anchor * MAX_DEPTHS + depth)


def classify_blocks(q: RowSet, k: RowSet) -> tuple[Tensor, Tensor]:
    """Two masks [Q blocks, K blocks]: may any pair of rows see each other, and do all pairs."""
    q_doc, q_anchor = _block_range(q.doc), _block_range(q.anchor)
    k_doc, k_anchor, k_depth = _block_range(k.doc), _block_range(k.anchor), _block_range(k.depth)
    docs_overlap = (k_doc.low <= q_doc.high[:, None]) & (k_doc.high >= q_doc.low[:, None])
    q_first = _block_range(q.first_visible)
    key_before = k_anchor.low <= q_anchor.high[:, None]
    anchors_overlap = key_before & (k_anchor.high >= q_anchor.low[:, None])
    in_window = key_before & (k_anchor.high >= q_first.low[:, None])
    visible = docs_overlap & torch.where(k_depth.low == 0, in_window, anchors_overlap)
    single_doc = (q_doc.low == q_doc.high)[:, None] & (k_doc.low == k_doc.high)
    same_doc = single_doc & (q_doc.low[:, None] == k_doc.low)
    all_before = (k_depth.high == 0) & (k_anchor.high <= q_anchor.low[:, None])
    full = same_doc & all_before & (k_anchor.low >= q_first.high[:, None])
    return visible, full


class BlockRange(NamedTuple):
    low: Tensor  # [blocks]
    high: Tensor  # [blocks]


def _block_range(x: Tensor) -> BlockRange:
    """The lowest and highest value of each block; a short last block repeats its last value."""
    padded = torch.cat([x, x[-1:].expand(-len(x) % BLOCK_SIZE)]).view(-1, BLOCK_SIZE)
    return BlockRange(padded.amin(1), padded.amax(1))


def _to_block_list(blocks: Tensor) -> BlockList:
    """Convert a mask [Q blocks, K blocks] to flex attention's form."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    # Flex attention's kernels assume contiguous rows, whatever the strides are.
    return BlockList(blocks.sum(-1, dtype=torch.int32), order.int().contiguous())


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
    """q [Q, heads, head_dim], k and v [K, kv_heads, head_dim] -> [Q, heads, head_dim]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if isinstance(mask, BlockMask):
        eager = q.is_cuda and not torch.compiler.is_compiling()
        flex = compiled_flex_attention() if eager else flex_attention
        out = flex(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
    else:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


@cache
def compiled_flex_attention() -> Any:
    """Flex attention for eager code, which would otherwise keep every score."""
    return torch.compile(flex_attention)
