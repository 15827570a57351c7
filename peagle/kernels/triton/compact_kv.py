"""Keys and values of an accepted path, moved to the slots that a chain's would have.

Row i of a tree is stored in the KV slot of position first + i; the path's row at depth d belongs to
position first + d, for d up to the number of accepted drafts.

    first 9, path rows 0 1 3, 2 drafts accepted: position 12 moves to position 11

The rows of a path ascend: if all are read first, no row is overwritten before it is moved.

Shapes: cache [layers, slots, width], first_positions and accepted_counts [B], path_rows [B, K + 1],
page_tables [B, P]. The cache is updated in place.
"""

import torch
from torch import Tensor

from peagle.kernels.triton import uses_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the reference runs
    triton = None

MAX_BLOCK_WIDTH = 256


def reference(
    cache: Tensor,
    first_positions: Tensor,
    accepted_counts: Tensor,
    path_rows: Tensor,
    page_tables: Tensor,
    page_size: int,
) -> None:
    """The same operation in plain PyTorch."""
    depths = torch.arange(path_rows.shape[1], device=path_rows.device)
    moves = (depths <= accepted_counts[:, None]) & (path_rows != depths)
    request, depth = moves.nonzero(as_tuple=True)

    def slots(positions: Tensor) -> Tensor:
        pages = page_tables[request, positions // page_size].long()
        return pages * page_size + positions % page_size

    first = first_positions[request].long()
    cache[:, slots(first + depth)] = cache[:, slots(first + path_rows[request, depth])]


if triton is not None:

    @triton.jit
    def _kv_slots(  # type: ignore[no-untyped-def]
        table_ptr, position, mask, PAGE_SIZE: tl.constexpr
    ):
        page = tl.load(table_ptr + position // PAGE_SIZE, mask=mask, other=0)
        return page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE

    @triton.jit
    def _compact_kv_kernel(  # type: ignore[no-untyped-def]
        cache_ptr,
        first_positions_ptr,
        accepted_ptr,
        path_rows_ptr,
        page_tables_ptr,
        stride_cache_layer,
        stride_table_row,
        width,
        K: tl.constexpr,
        PAGE_SIZE: tl.constexpr,
        BLOCK_K: tl.constexpr,
        BLOCK_W: tl.constexpr,
    ):
        b = tl.program_id(0)
        layer = tl.program_id(1).to(tl.int64)
        depth = tl.arange(0, BLOCK_K)
        col = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
        first = tl.load(first_positions_ptr + b)
        row = tl.load(path_rows_ptr + b * (K + 1) + depth, mask=depth <= K, other=0).to(tl.int32)
        moves = (depth <= tl.load(accepted_ptr + b)) & (row != depth)
        table_ptr = page_tables_ptr + b.to(tl.int64) * stride_table_row
        source = _kv_slots(table_ptr, first + row, moves, PAGE_SIZE)
        target = _kv_slots(table_ptr, first + depth, moves, PAGE_SIZE)
        layer_ptr = cache_ptr + layer * stride_cache_layer + col[None, :]
        mask = moves[:, None] & (col < width)[None, :]
        x = tl.load(layer_ptr + source[:, None] * width, mask=mask)
        tl.debug_barrier()  # Every thread has loaded.
        tl.store(layer_ptr + target[:, None] * width, x, mask=mask)


def compact_kv(
    cache: Tensor,
    first_positions: Tensor,
    accepted_counts: Tensor,
    path_rows: Tensor,
    page_tables: Tensor,
    page_size: int,
) -> None:
    if not uses_triton(cache):
        reference(cache, first_positions, accepted_counts, path_rows, page_tables, page_size)
        return
    layers, _, width = cache.shape
    assert cache.stride(1) == width and path_rows.is_contiguous() and page_tables.stride(1) == 1
    k = path_rows.shape[1] - 1
    block_width = min(MAX_BLOCK_WIDTH, triton.next_power_of_2(width))
    _compact_kv_kernel[(len(first_positions), layers, triton.cdiv(width, block_width))](
        cache,
        first_positions,
        accepted_counts,
        path_rows,
        page_tables,
        cache.stride(0),
        page_tables.stride(0),
        width,
        K=k,
        PAGE_SIZE=page_size,
        BLOCK_K=triton.next_power_of_2(k + 1),
        BLOCK_W=block_width,
        num_warps=4,
    )
