"""The product of any number of rows with a weight matrix: a row gets the same bits in any batch.

Every output is one chain of tensor-core products over its inputs in their order, 16 at a time, into
a float32 accumulator, which is rounded once. skinny_gemm.py without splits is such a chain, and so
is the kernel here. On Hopper both tensor-core instructions that Triton uses (mma.sync for narrow
tiles, wgmma for wide ones) give the same bits. With 8-bit weights mma.sync takes the inputs in
another order, so all tiles for them are wide. Kernels of the vendor's library that do not split the
inputs are such chains as well: see vendor_gemm.py.

Shapes and rounding are those of skinny_gemm.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.triton import uses_triton
from peagle.kernels.triton.launch.dependent_launch import launch_options
from peagle.kernels.triton.skinny_gemm import (
    ALIGNMENT,
    TileSizes,
    gated_skinny_gemm,
    skinny_gemm,
    supports_skinny_gemm,
)

try:
    import triton
    import triton.language as tl

    from peagle.kernels.triton.launch.dependent_launch import launch_next, wait_for_inputs
except ImportError:  # without Triton the reference of skinny_gemm.py runs
    triton = None

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
    GemmTiles(block_n=128, block_t=256, block_k=64, num_warps=8, num_stages=4),
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
        inputs,
        stride_x_row,
        stride_weight_row,
        stride_out_row,
        GATED: tl.constexpr,
        BIAS: tl.constexpr,
        SCALED: tl.constexpr,
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
        total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for start in range(0, inputs, BLOCK_K):
            x = tl.load(x_tile_ptr + start, mask=row_mask, other=0.0)
            weight = _load_weight(weight_tile_ptr + start, output_mask, EVEN_N).to(x.dtype)
            total = tl.dot(weight, x, total, input_precision="ieee")
            if GATED:
                up_weight = _load_weight(up_tile_ptr + start, output_mask, EVEN_N).to(x.dtype)
                up = tl.dot(up_weight, x, up, input_precision="ieee")
        if SCALED:
            total *= tl.load(scales_ptr + n, mask=n < outputs, other=0.0)[:, None]
            if GATED:
                up *= tl.load(scales_ptr + outputs + n, mask=n < outputs, other=0.0)[:, None]
        if BIAS:
            total += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
        dtype = x_ptr.dtype.element_ty
        if GATED:
            gate = total.to(dtype).to(tl.float32)
            activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
            total = activated * up.to(dtype).to(tl.float32)
        tl.store(
            out_ptr + t[None, :] * stride_out_row + n[:, None],
            total.to(out_ptr.dtype.element_ty),
            mask=row_mask & output_mask,
        )


def invariant_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    tiles: GemmTiles | None = None,
) -> Tensor:
    """[T, N]"""
    if tiles is None and supports_skinny_gemm(x, weight):
        return skinny_gemm(x, weight, bias, scales, chain_tiles(weight, len(x)), splits=1)
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, scales, out, False, tiles or tile_sizes(TILES, *out.shape))
    return out


def gated_invariant_gemm(
    x: Tensor, weight: Tensor, scales: Tensor | None = None, tiles: GemmTiles | None = None
) -> Tensor:
    """silu(x gate) * (x up), [T, I]"""
    # With 8-bit weights, the compiler orders the products of a gate in another way for few rows.
    if tiles is None and scales is None and supports_skinny_gemm(x, weight, gated=True):
        return gated_skinny_gemm(x, weight, scales)
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, None, scales, out, True, tiles or tile_sizes(GATED_TILES, *out.shape))
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    out: Tensor,
    gated: bool,
    tiles: GemmTiles,
) -> None:
    rows, n = out.shape
    if not rows:
        return
    inputs = weight.shape[1]
    assert inputs % tiles.block_k == 0
    _invariant_gemm_kernel[(tile_count(tiles, rows, n),)](
        x,
        weight,
        x if bias is None else bias,
        x if scales is None else scales,
        out,
        rows,
        n,
        inputs,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        GATED=gated,
        BIAS=bias is not None,
        SCALED=scales is not None,
        EVEN_N=n % tiles.block_n == 0,
        GROUP=GROUP_ROW_BLOCKS,
        BLOCK_T=tiles.block_t,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,  # A scale must not merge with the bias.
        **launch_options(x),
    )


def tile_count(tiles: GemmTiles, rows: int, outputs: int) -> int:
    return triton.cdiv(rows, tiles.block_t) * triton.cdiv(outputs, tiles.block_n)


def tile_sizes(choices: tuple[GemmTiles, ...], rows: int, outputs: int) -> GemmTiles:
    """The largest tiles that keep a GPU busy."""
    if rows <= FEW_ROWS_TILES.block_t:
        return FEW_ROWS_TILES
    for tiles in choices:
        if rows >= tiles.block_t and tile_count(tiles, rows, outputs) >= BUSY_PROGRAMS:
            return tiles
    return choices[-1]


def chain_tiles(weight: Tensor, rows: int) -> TileSizes:
    """Tiles of skinny_gemm.py for outputs that are not split, measured on an H200.

    For few rows, narrow tiles keep the GPU busy where wide ones are too few.
    """
    outputs, inputs = weight.shape
    block_k = 128 if inputs % 128 == 0 else 64
    if rows > 16 or outputs // 64 >= 192 or weight.element_size() == 1:
        return TileSizes(64, block_k, num_warps=4, num_stages=4 if block_k == 128 else 6)
    if outputs // 32 >= 132:
        return TileSizes(32, block_k, num_warps=2, num_stages=6)
    return TileSizes(16, 64, num_warps=2, num_stages=8)
