"""Keys and values of an accepted path, moved to where a chain's would lie.

Row i of a tree lies in the slot of position first + i; the path's row at depth d belongs to position first + d, for
d up to kept. A path's rows rise, so nothing is overwritten that is still to be moved, if all are read first.

Shapes: cache [layers, slots, width], first and kept [B], path [B, K + 1], tables [B, P]. In place.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without it uses the reference
    triton = None


def reference(
    cache: Tensor, first: Tensor, kept: Tensor, path: Tensor, tables: Tensor, page: int
) -> None:
    """What the kernel does, in plain PyTorch."""
    depth = torch.arange(path.shape[1], device=path.device)
    b, d = ((depth <= kept[:, None]) & (path != depth)).nonzero(as_tuple=True)

    def slots(position: Tensor) -> Tensor:
        return tables[b, position // page].long() * page + position % page

    begin = first[b].long()
    cache[:, slots(begin + d)] = cache[:, slots(begin + path[b, d])]


if triton is not None:

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        cache,
        first,
        kept,
        path,
        tables,
        layer_stride,
        table_row,
        width,
        K: tl.constexpr,
        PAGE: tl.constexpr,
        BLOCK_K: tl.constexpr,
        BLOCK_W: tl.constexpr,
    ):
        b, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
        depth, col = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
        begin = tl.load(first + b)
        row = tl.load(path + b * (K + 1) + depth, mask=depth <= K, other=0).to(tl.int32)
        moves = (depth <= tl.load(kept + b)) & (row != depth)
        table = tables + b.to(tl.int64) * table_row
        old, new = begin + row, begin + depth
        source = tl.load(table + old // PAGE, mask=moves, other=0).to(tl.int64) * PAGE + old % PAGE
        target = tl.load(table + new // PAGE, mask=moves, other=0).to(tl.int64) * PAGE + new % PAGE
        mine = cache + layer * layer_stride + col[None, :]
        there = moves[:, None] & (col < width)[None, :]
        x = tl.load(mine + source[:, None] * width, mask=there)
        tl.debug_barrier()  # everything is read
        tl.store(mine + target[:, None] * width, x, mask=there)


def compact_kv(
    cache: Tensor, first: Tensor, kept: Tensor, path: Tensor, tables: Tensor, page: int
) -> None:
    if triton is None or not (cache.is_cuda or triton.knobs.runtime.interpret):
        reference(cache, first, kept, path, tables, page)
        return
    layers, _, width = cache.shape
    assert cache.stride(1) == width and path.is_contiguous() and tables.stride(1) == 1
    k, block = path.shape[1] - 1, min(256, triton.next_power_of_2(width))
    _kernel[(len(first), layers, triton.cdiv(width, block))](
        cache,
        first,
        kept,
        path,
        tables,
        cache.stride(0),
        tables.stride(0),
        width,
        K=k,
        PAGE=page,
        BLOCK_K=triton.next_power_of_2(k + 1),
        BLOCK_W=block,
        num_warps=4,
    )
