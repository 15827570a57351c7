"""The product of any number of rows with a weight matrix, in an order that the matrix alone decides.

Few rows go through skinny_gemm.py, more through the kernel here, and both give a row the same bits.
The inputs are divided into the S segments of `num_splits`. A segment is one chain of tensor-core
products over its inputs, 16 at a time, into a float32 accumulator. The sums of the segments are
added in their order:

    segments (a0 .. a15), (a16 .. a31) ..   ->   ((segment 0 + segment 1) + segment 2) + ..

A program computes a tile of outputs and rows. With few tiles, the segments belong to different
programs, and the kernel that reads the result adds them (add_norm, rope_store). With many tiles, a
program computes all segments and adds them itself: the same additions, rounded once.

Shapes and rounding are those of skinny_gemm.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.triton import uses_triton
from peagle.kernels.triton.launch.dependent_launch import launch_options
from peagle.kernels.triton.skinny_gemm import (
    ALIGNMENT,
    gated_skinny_gemm,
    num_splits,
    skinny_gemm,
    supports_skinny_gemm,
)

try:
    import triton
    import triton.language as tl

    from peagle.kernels.triton.launch.dependent_launch import launch_next, wait_for_inputs
except ImportError:  # without Triton the reference of skinny_gemm.py runs
    triton = None

# Whether skinny_gemm gives the bits of this kernel. False: this kernel multiplies few rows, too,
# with tiles for which all row counts use the same tensor-core instruction.
USES_SKINNY_GEMM = True
BUSY_PROGRAMS = 132  # programs that keep a GPU busy
GROUP_ROW_BLOCKS = 8  # blocks of rows whose programs run side by side and share weights in L2


class GemmTiles(NamedTuple):
    block_n: int
    block_t: int
    block_k: int
    num_warps: int
    num_stages: int


FEW_ROWS_TILES = GemmTiles(block_n=64, block_t=16, block_k=64, num_warps=4, num_stages=5)
# From large to small: the first that keeps a GPU busy is used.
TILES = (
    GemmTiles(block_n=128, block_t=256, block_k=64, num_warps=8, num_stages=3),
    GemmTiles(block_n=128, block_t=128, block_k=64, num_warps=8, num_stages=4),
    GemmTiles(block_n=64, block_t=128, block_k=64, num_warps=4, num_stages=4),
    GemmTiles(block_n=64, block_t=64, block_k=64, num_warps=4, num_stages=4),
)
# A program multiplies gate and up.
GATED_TILES = (
    GemmTiles(block_n=128, block_t=128, block_k=64, num_warps=8, num_stages=3),
    GemmTiles(block_n=64, block_t=128, block_k=64, num_warps=4, num_stages=3),
    GemmTiles(block_n=64, block_t=64, block_k=64, num_warps=4, num_stages=4),
)


def supports_invariant_gemm(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel supports this product."""
    narrow = x.element_size() == 2 or not x.is_cuda
    aligned = weight.shape[1] % ALIGNMENT == 0
    return uses_triton(x) and narrow and aligned and x.stride(1) == weight.stride(1) == 1


if triton is not None:

    @triton.jit
    def _load_weight(ptr, mask, EVEN_N: tl.constexpr):  # type: ignore[no-untyped-def]
        return tl.load(ptr) if EVEN_N else tl.load(ptr, mask=mask, other=0.0)

    @triton.jit
    def _multiply_segment(  # type: ignore[no-untyped-def]
        x_tile_ptr,
        weight_tile_ptr,
        up_tile_ptr,
        row_mask,
        output_mask,
        first_input,
        split_inputs,
        GATED: tl.constexpr,
        EVEN_N: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_K: tl.constexpr,
    ):
        """[BLOCK_N, BLOCK_T] float32: the sums over one segment; of a gate, and of its up."""
        total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for start in range(first_input, first_input + split_inputs, BLOCK_K):
            x = tl.load(x_tile_ptr + start, mask=row_mask, other=0.0)
            weight = _load_weight(weight_tile_ptr + start, output_mask, EVEN_N).to(x.dtype)
            total = tl.dot(weight, x, total, input_precision="ieee")
            if GATED:
                up_weight = _load_weight(up_tile_ptr + start, output_mask, EVEN_N).to(x.dtype)
                up = tl.dot(up_weight, x, up, input_precision="ieee")
        return total, up

    @triton.jit
    def _tile_position(  # type: ignore[no-untyped-def]
        program, row_blocks, output_blocks, GROUP: tl.constexpr
    ):
        """The blocks of outputs and of rows of a program; a group of row blocks comes first."""
        group_programs = GROUP * output_blocks
        first_row_block = program // group_programs * GROUP
        size = tl.minimum(row_blocks - first_row_block, GROUP)
        place = program % group_programs
        return place // size, first_row_block + place % size

    @triton.jit(do_not_specialize=["rows"])
    def _invariant_gemm_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        weight_ptr,
        bias_ptr,
        scales_ptr,
        out_ptr,
        rows,
        outputs,
        stride_x_row,
        stride_weight_row,
        split_inputs,
        stride_out_split,
        stride_out_row,
        GATED: tl.constexpr,
        BIAS: tl.constexpr,
        SCALED: tl.constexpr,
        SEGMENTS: tl.constexpr,
        EVEN_N: tl.constexpr,
        GROUP: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_K: tl.constexpr,
        DEPENDENT: tl.constexpr,
    ):
        row_blocks = (rows + BLOCK_T - 1) // BLOCK_T
        output_blocks = (outputs + BLOCK_N - 1) // BLOCK_N
        n_block, t_block = _tile_position(tl.program_id(0), row_blocks, output_blocks, GROUP)
        n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
        t = (t_block * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        k = tl.arange(0, BLOCK_K)
        row_mask = (t < rows)[None, :]
        output_mask = (n < outputs)[:, None]
        weight_tile_ptr = weight_ptr + n.to(tl.int64)[:, None] * stride_weight_row + k[None, :]
        up_tile_ptr = weight_tile_ptr + outputs.to(tl.int64) * stride_weight_row
        wait_for_inputs(DEPENDENT)
        launch_next(DEPENDENT)
        x_tile_ptr = x_ptr + t[None, :] * stride_x_row + k[:, None]
        # Programs of one segment each, or one program that adds all segments.
        first_segment = tl.program_id(1)
        total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        up = total
        for i in range(SEGMENTS):
            segment = first_segment + i
            part, up = _multiply_segment(
                x_tile_ptr,
                weight_tile_ptr,
                up_tile_ptr,
                row_mask,
                output_mask,
                segment * split_inputs,
                split_inputs,
                GATED,
                EVEN_N,
                BLOCK_N,
                BLOCK_T,
                BLOCK_K,
            )
            if SCALED:
                scales = tl.load(scales_ptr + n, mask=n < outputs, other=0.0)
                part *= scales[:, None]
            if BIAS:
                bias = tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)
                part += tl.where(segment == 0, bias, 0.0)[:, None]
            total = part if SEGMENTS == 1 else total + part
        dtype = x_ptr.dtype.element_ty
        if GATED:
            if SCALED:
                up_scales = tl.load(scales_ptr + outputs + n, mask=n < outputs, other=0.0)
                up *= up_scales[:, None]
            gate = total.to(dtype).to(tl.float32)
            activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
            total = activated * up.to(dtype).to(tl.float32)
        tl.store(
            out_ptr + first_segment * stride_out_split + t[None, :] * stride_out_row + n[:, None],
            total.to(out_ptr.dtype.element_ty),
            mask=row_mask & output_mask,
        )


def split_k_product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """[T, N], or partial sums [S, T, N] that add_norm and rope_store add up."""
    if uses_skinny(x, weight):
        return skinny_gemm(x, weight, bias, scales)
    return invariant_gemm(x, weight, bias, scales)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """[T, N]"""
    if uses_skinny(x, weight) and num_splits(weight) == 1:
        return skinny_gemm(x, weight, bias, scales)
    return invariant_gemm(x, weight, bias, scales, sums_segments=True)


def gated_product(x: Tensor, weight: Tensor, scales: Tensor | None = None) -> Tensor:
    """silu(x gate) * (x up), [T, I]"""
    if uses_skinny(x, weight, gated=True):
        return gated_skinny_gemm(x, weight, scales)
    return gated_invariant_gemm(x, weight, scales)


def uses_skinny(x: Tensor, weight: Tensor, gated: bool = False) -> bool:
    return USES_SKINNY_GEMM and supports_skinny_gemm(x, weight, gated)


def invariant_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    tiles: GemmTiles | None = None,
    sums_segments: bool | None = None,
) -> Tensor:
    """[T, N], or partial sums [S, T, N]; `sums_segments` None: whichever is faster."""
    splits = num_splits(weight)
    rows, n = len(x), len(weight)
    if tiles is None:
        choices = TILES if splits == 1 else TILES[1:]  # The largest fill the registers.
        tiles = tile_sizes(choices, rows, n, 1 if sums_segments else splits)
    if sums_segments is None:
        sums_segments = tile_count(tiles, rows, n) >= BUSY_PROGRAMS
    if splits == 1 or sums_segments:
        out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    else:
        out = torch.empty(splits, rows, n, dtype=torch.float32, device=x.device)
    _launch(x, weight, bias, scales, out, splits, False, tiles)
    return out


def gated_invariant_gemm(
    x: Tensor, weight: Tensor, scales: Tensor | None = None, tiles: GemmTiles | None = None
) -> Tensor:
    """silu(x gate) * (x up), [T, I]"""
    inner = len(weight) // 2
    tiles = tiles or tile_sizes(GATED_TILES, len(x), inner, 1)
    out = torch.empty(len(x), inner, dtype=x.dtype, device=x.device)
    _launch(x, weight, None, scales, out, 1, True, tiles)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    out: Tensor,
    splits: int,
    gated: bool,
    tiles: GemmTiles,
) -> None:
    rows, n = out.shape[-2:]
    if not rows:
        return
    stored = len(out) if out.dim() == 3 else 1
    split_inputs = weight.shape[1] // splits
    even = n % tiles.block_n == 0
    assert split_inputs % tiles.block_k == 0
    _invariant_gemm_kernel[(tile_count(tiles, rows, n), stored)](
        x,
        weight,
        x if bias is None else bias,
        x if scales is None else scales,
        out,
        rows,
        n,
        x.stride(0),
        weight.stride(0),
        split_inputs,
        out.stride(0) if stored > 1 else 0,
        out.stride(-2),
        GATED=gated,
        BIAS=bias is not None,
        SCALED=scales is not None,
        SEGMENTS=splits // stored,
        EVEN_N=even,
        GROUP=GROUP_ROW_BLOCKS,
        BLOCK_T=tiles.block_t,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,  # A segment's scale must not merge with the sum of segments.
        **launch_options(x),
    )


def tile_count(tiles: GemmTiles, rows: int, outputs: int) -> int:
    return triton.cdiv(rows, tiles.block_t) * triton.cdiv(outputs, tiles.block_n)


def tile_sizes(choices: tuple[GemmTiles, ...], rows: int, outputs: int, splits: int) -> GemmTiles:
    """The largest tiles that keep a GPU busy; `splits`: programs of one tile at most."""
    if rows <= FEW_ROWS_TILES.block_t:
        return FEW_ROWS_TILES
    for tiles in choices:
        fits = rows >= tiles.block_t or tiles is choices[-1]
        if fits and tile_count(tiles, rows, outputs) * splits >= BUSY_PROGRAMS:
            return tiles
    return choices[-1]
