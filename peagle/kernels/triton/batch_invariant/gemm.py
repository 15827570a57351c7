"""The product of any number of rows with a weight matrix: a row gets the same bits in any batch.

Every output is one chain of tensor-core products over its inputs in their order, 16 at a time, into
a float32 accumulator, which is rounded once. A matrix with few outputs has S such chains, which are
added in their order (split_k.py). On Hopper both tensor-core instructions that Triton uses
(mma.sync for narrow tiles, wgmma for wide ones) give the same bits. With 8-bit weights mma.sync
takes the inputs in another order, so all tiles for them are wide. Kernels of the vendor's library
that do not split the inputs are such chains as well: see vendor_gemm.py.

    rows                              multiplied by                        result
    few                               skinny_gemm.py                       [S, T, N]
    more, and tiles that are few      a program for each tile and chain    [S, T, N]
    more, and tiles that are enough   a program for each tile, which       [T, N]
                                      adds its chains

Shapes and rounding are those of skinny_gemm.py: the result is [T, N], or partial sums [S, T, N] in
float32, with the bias in the first.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.triton import uses_triton
from peagle.kernels.triton.batch_invariant.split_k import num_splits
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

    @triton.jit
    def _multiply_chain(  # type: ignore[no-untyped-def]
        x_tile_ptr,
        weight_tile_ptr,
        up_tile_ptr,
        row_mask,
        output_mask,
        first_input,
        end_input,
        GATED: tl.constexpr,
        EVEN_N: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_K: tl.constexpr,
    ):
        """[BLOCK_N, BLOCK_T] float32 each: the sums over a range of inputs, and those of up."""
        total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for start in range(first_input, end_input, BLOCK_K):
            x = tl.load(x_tile_ptr + start, mask=row_mask, other=0.0)
            weight = _load_weight(weight_tile_ptr + start, output_mask, EVEN_N).to(x.dtype)
            total = tl.dot(weight, x, total, input_precision="ieee")
            if GATED:
                up_weight = _load_weight(up_tile_ptr + start, output_mask, EVEN_N).to(x.dtype)
                up = tl.dot(up_weight, x, up, input_precision="ieee")
        return total, up

    @triton.jit(do_not_specialize=["rows"])
    def _invariant_gemm_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        weight_ptr,
        bias_ptr,
        scales_ptr,
        out_ptr,
        rows,
        outputs,
        split_inputs,
        stride_x_row,
        stride_weight_row,
        stride_out_split,
        stride_out_row,
        GATED: tl.constexpr,
        BIAS: tl.constexpr,
        SCALED: tl.constexpr,
        EVEN_N: tl.constexpr,
        CHAINS: tl.constexpr,
        GROUP: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_K: tl.constexpr,
        DEPENDENT: tl.constexpr,
    ):
        row_blocks = (rows + BLOCK_T - 1) // BLOCK_T
        output_blocks = (outputs + BLOCK_N - 1) // BLOCK_N
        n_block, t_block = _tile_position(tl.program_id(0), row_blocks, output_blocks, GROUP)
        split = tl.program_id(1)
        n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
        t = (t_block * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        k = split * split_inputs + tl.arange(0, BLOCK_K)
        row_mask = (t < rows)[None, :]
        output_mask = (n < outputs)[:, None]
        weight_tile_ptr = weight_ptr + n.to(tl.int64)[:, None] * stride_weight_row + k[None, :]
        up_tile_ptr = weight_tile_ptr + outputs.to(tl.int64) * stride_weight_row
        wait_for_inputs(DEPENDENT)
        launch_next(DEPENDENT)
        x_tile_ptr = x_ptr + t[None, :] * stride_x_row + k[:, None]
        total, up = _multiply_chain(
            x_tile_ptr,
            weight_tile_ptr,
            up_tile_ptr,
            row_mask,
            output_mask,
            0,
            split_inputs,
            GATED,
            EVEN_N,
            BLOCK_N,
            BLOCK_T,
            BLOCK_K,
        )
        if SCALED:
            total *= tl.load(scales_ptr + n, mask=n < outputs, other=0.0)[:, None]
            if GATED:
                up *= tl.load(scales_ptr + outputs + n, mask=n < outputs, other=0.0)[:, None]
        if BIAS:
            bias = tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)
            total += tl.where(split == 0, bias, 0.0)[:, None]
        for chain in range(1, CHAINS):  # of this program
            part, _ = _multiply_chain(
                x_tile_ptr,
                weight_tile_ptr,
                up_tile_ptr,
                row_mask,
                output_mask,
                chain * split_inputs,
                chain * split_inputs + split_inputs,
                False,
                EVEN_N,
                BLOCK_N,
                BLOCK_T,
                BLOCK_K,
            )
            if SCALED:
                part *= tl.load(scales_ptr + n, mask=n < outputs, other=0.0)[:, None]
            total += part
        dtype = x_ptr.dtype.element_ty
        if GATED:
            gate = total.to(dtype).to(tl.float32)
            activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
            total = activated * up.to(dtype).to(tl.float32)
        tl.store(
            out_ptr + split * stride_out_split + t[None, :] * stride_out_row + n[:, None],
            total.to(out_ptr.dtype.element_ty),
            mask=row_mask & output_mask,
        )


def invariant_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    tiles: GemmTiles | None = None,
    splits: int | None = None,
    parallel: bool | None = None,
) -> Tensor:
    """[T, N], or partial sums [S, T, N].

    `splits`: S, by default that of the matrix. `parallel`: whether every chain has its own program,
    and partial sums are the result; None: as is faster.
    """
    splits = splits or num_splits(weight)
    rows, outputs = len(x), len(weight)
    if tiles is None and parallel is not False and supports_skinny_gemm(x, weight):
        return skinny_gemm(x, weight, bias, scales, few_rows_tiles(weight, splits), splits)
    tiles = tiles or tile_sizes(split_tiles(splits, parallel), rows, outputs)
    if parallel is None:
        parallel = tile_count(tiles, rows, outputs) < BUSY_PROGRAMS
    if parallel and splits > 1:
        out = torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    else:
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, scales, out, False, tiles, splits)
    return out


def gated_invariant_gemm(
    x: Tensor, weight: Tensor, scales: Tensor | None = None, tiles: GemmTiles | None = None
) -> Tensor:
    """silu(x gate) * (x up), [T, I]"""
    # With 8-bit weights, the compiler orders the products of a gate in another way for few rows.
    if tiles is None and scales is None and supports_skinny_gemm(x, weight, gated=True):
        return gated_skinny_gemm(x, weight, scales)
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, None, scales, out, True, tiles or tile_sizes(GATED_TILES, *out.shape), 1)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    out: Tensor,
    gated: bool,
    tiles: GemmTiles,
    splits: int,
) -> None:
    rows, n = out.shape[-2:]
    if not rows:
        return
    stored = len(out) if out.dim() == 3 else 1
    split_inputs = weight.shape[1] // splits
    assert split_inputs * splits == weight.shape[1] and split_inputs % tiles.block_k == 0
    _invariant_gemm_kernel[(tile_count(tiles, rows, n), stored)](
        x,
        weight,
        x if bias is None else bias,
        x if scales is None else scales,
        out,
        rows,
        n,
        split_inputs,
        x.stride(0),
        weight.stride(0),
        out.stride(0) if stored > 1 else 0,
        out.stride(-2),
        GATED=gated,
        BIAS=bias is not None,
        SCALED=scales is not None,
        EVEN_N=n % tiles.block_n == 0,
        CHAINS=splits // stored,
        GROUP=GROUP_ROW_BLOCKS,
        BLOCK_T=tiles.block_t,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,  # A scale must not merge with the bias or the sum of chains.
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


def split_tiles(splits: int, parallel: bool | None) -> tuple[GemmTiles, ...]:
    """Tiles for which the compiler lets products overlap, for one or two sums in registers."""
    if splits == 1:
        return TILES
    return TILES[1:] if splits == 2 and not parallel else TILES[2:]


def few_rows_tiles(weight: Tensor, splits: int) -> TileSizes | None:
    """Tiles of skinny_gemm.py: None for its own choice, wide ones for weights in 8 bits."""
    if weight.element_size() > 1:
        return None
    block_k = 128 if weight.shape[1] // splits % 128 == 0 else 64
    return TileSizes(64, block_k, num_warps=4, num_stages=4 if block_k == 128 else 6)
