"""Which rows see which: the closed-form attention rule of training, dense and as flex attention's block mask.

A row has a document, an anchor a and a depth d. Depth 0 is a position with real inputs; depth d >= 1 is the d-th
mask row (P-EAGLE) or the d-th own step (EAGLE-3) after anchor a. Within a document, query (a_q, d_q) sees key
(a_k, d_k) iff

    (d_k == 0 and a_k <= a_q)  or  (a_k == a_q and d_k <= s_q)

Of its own chain it sees the rows up to depth s_q: up to itself, or, in a bidirectional block, all of them. For one
anchor this is exactly the pattern of inference: all real rows up to the anchor, then its own chain.

    anchors 0 1 2 real, chain rows 1.1 1.2 (anchor.depth):      0  1  2  1.1  1.2
                                                        row 2   x  x  x   .    .
                                                        row 1.2 x  x  .   x    x
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

MOST_DEPTHS = 64
BLOCK = 128  # flex attention's block; a block of keys is all depth 0 or all deeper


@dataclass(frozen=True, slots=True)
class RowSet:
    """Rows side by side, [R] int32 each. Anchors are indices into the pack, so they rise with the documents."""

    doc: Tensor
    start: Tensor  # the first index of the document
    anchor: Tensor
    depth: Tensor
    sees: Tensor  # the deepest row of its own chain that it sees

    def __len__(self) -> int:
        return len(self.doc)

    def __add__(self, other: "RowSet") -> "RowSet":
        return RowSet(*(torch.cat(pair) for pair in zip(self.fields, other.fields, strict=True)))

    def __getitem__(self, at: slice) -> "RowSet":
        return RowSet(*(x[at] for x in self.fields))

    @property
    def fields(self) -> tuple[Tensor, ...]:
        return (self.doc, self.start, self.anchor, self.depth, self.sees)


Mask = Tensor | BlockMask


def dense_mask(q: RowSet, k: RowSet) -> Tensor:
    """[Q, K] bool: the rule as it is written above."""
    same = q.doc[:, None] == k.doc
    context = (k.depth == 0) & (k.anchor <= q.anchor[:, None])
    chain = (k.anchor == q.anchor[:, None]) & (k.depth <= q.sees[:, None])
    return same & (context | chain)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Which blocks hold pairs that see each other, in flex attention's lists, int32: partly and fully, by query block
    (for the forward) and by key block (for the backward). [Q blocks] and [Q blocks, K blocks], or turned round."""

    part: tuple[Tensor, Tensor]
    full: tuple[Tensor, Tensor]
    part_by_key: tuple[Tensor, Tensor]
    full_by_key: tuple[Tensor, Tensor]


def blocks_of(q: RowSet, k: RowSet) -> Blocks:
    """Many small operations: done ahead on the host, beside the GPU's work."""
    some, full = _blocks(q, k)
    part = some & ~full
    return Blocks(_listed(part), _listed(full), _listed(part.T), _listed(full.T))


def block_mask(q: RowSet, k: RowSet, blocks: Blocks | None = None) -> BlockMask:
    """The same rule for flex attention, in few loads: a key has one number, a query two intervals of them.

    Key j of depth 0 (it lies at index j, its anchor) has the number j, a deeper one -1 - (64 a + d). A query sees the
    numbers start..a_q, and those of its own chain, -1 - (64 a_q + s_q)..-1 - 64 a_q.
    """
    number = torch.where(k.depth == 0, k.anchor, _chain_number(k.anchor, k.depth))
    first, last = q.start, q.anchor
    deepest, own = (
        _chain_number(q.anchor, q.sees),
        _chain_number(q.anchor, torch.zeros_like(q.depth)),
    )

    def allowed(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        n = number[j]
        return ((n >= first[i]) & (n <= last[i])) | ((n >= deepest[i]) & (n <= own[i]))

    return _as_block_mask(blocks or blocks_of(q, k), allowed, len(q), len(k))


def context_mask(rows: RowSet, blocks: Blocks | None = None) -> BlockMask:
    """The rule among rows of depth 0, which lie at their anchors: causal within the document."""
    first = rows.start

    def allowed(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (j >= first[i])

    return _as_block_mask(blocks or blocks_of(rows, rows), allowed, len(rows), len(rows))


def _as_block_mask(blocks: Blocks, allowed: Any, rows: int, keys: int) -> BlockMask:
    kv, full, q, full_q = (
        (count[None, None], which[None, None])  # one batch, one head
        for count, which in (blocks.part, blocks.full, blocks.part_by_key, blocks.full_by_key)
    )
    return BlockMask((rows, keys), *kv, *full, *q, *full_q, (BLOCK, BLOCK), allowed)


def _chain_number(anchor: Tensor, depth: Tensor) -> Tensor:
    return -1 - (anchor * MOST_DEPTHS + depth)


def _blocks(q: RowSet, k: RowSet) -> tuple[Tensor, Tensor]:
    """[Q blocks, K blocks]: may any pair of rows see each other; do all pairs."""
    (q_doc, q_anchor), (k_doc, k_anchor) = (
        (_range(rows.doc), _range(rows.anchor)) for rows in (q, k)
    )  # ((lowest, highest), ...) with lowest and highest [blocks]
    k_depth = _range(k.depth)
    docs = (k_doc[0] <= q_doc[1][:, None]) & (k_doc[1] >= q_doc[0][:, None])
    behind = k_anchor[0] <= q_anchor[1][:, None]
    meet = behind & (k_anchor[1] >= q_anchor[0][:, None])
    context = k_depth[0] == 0
    some = docs & torch.where(context, behind, meet)
    one_doc = (
        (q_doc[0] == q_doc[1])[:, None] & (k_doc[0] == k_doc[1]) & (q_doc[0][:, None] == k_doc[0])
    )
    full = one_doc & (k_depth[1] == 0) & (k_anchor[1] <= q_anchor[0][:, None])
    return some, full


def _range(x: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and highest value of each block, [blocks] each; a short last block repeats its last value."""
    padded = torch.cat([x, x[-1:].expand(-len(x) % BLOCK)]).view(-1, BLOCK)
    return padded.amin(1), padded.amax(1)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has, and which, first: [Q] and [Q, K], int32."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(
        -1, dtype=torch.int32
    ), order.int().contiguous()  # flex's kernels read rows, whatever the strides


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
    """q [Q, heads, head_dim], k and v [K, kv_heads, head_dim] -> [Q, heads, head_dim]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if isinstance(mask, BlockMask):
        own = q.is_cuda and not torch.compiler.is_compiling()
        out = (compiled_flex() if own else flex_attention)(
            q, k, v, block_mask=mask, scale=scale, enable_gqa=True
        )
    else:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


@cache
def compiled_flex() -> Any:
    """Flex attention that is not part of compiled code must be compiled itself, or it keeps every score."""
    return torch.compile(flex_attention)


def mask_for(q: RowSet, k: RowSet, flex: bool, blocks: Blocks | None = None) -> Mask:
    if not flex:
        return dense_mask(q, k)
    return context_mask(q, blocks) if q is k else block_mask(q, k, blocks)
