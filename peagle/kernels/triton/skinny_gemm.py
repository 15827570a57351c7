"""The product of a few rows with a weight matrix, which dominates the time of a decode step.

Every weight is read once for a few rows, so memory bandwidth is the limit. A program computes some
outputs. If these are too few to keep a GPU busy, several programs split the inputs (split-K) and
store partial sums, which the kernel that reads the result adds (add_norm, rope_store, rotated
attention): that needs no launch of its own. The gated activation of an MLP runs in the launch that
computes its inputs.

    x [8, 4096], weight [4096, 4096]: 64 blocks of 64 outputs x 4 splits of 1024 inputs
    ->  partial sums [4, 8, 4096] float32

Weights do not depend on the kernel in front. A program loads its last ones, up to 512 inputs, while
it waits for its rows (dependent_launch.py); with few rows, all programs of a matrix are on the GPU
at once, and most of the matrix is there when the rows are.

The order in which a number is summed depends on the matrix alone, not on the number of rows, except
for small matrices in 8 bits, whose wide tiles use other instructions.

A weight in 8 bits (int8 or fp8, with a scale per output) is half as much to read: it is converted
to x's dtype before the product, which is exact, and its scale multiplies the sum.

Shapes: x [T, K], weight [N, K], bias and scales [N]. Result [T, N], or partial sums [S, T, N] in
float32. Gated: weight [2I, K] with the gate's rows first, result [T, I]; rounded where swiglu
rounds.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from peagle.kernels.triton import uses_triton
from peagle.kernels.triton.launch.dependent_launch import launch_options

try:
    import triton
    import triton.language as tl

    from peagle.kernels.triton.launch.dependent_launch import launch_next, wait_for_inputs
except ImportError:  # without Triton the reference runs
    triton = None

MAX_ROWS = 64  # with more rows arithmetic is the limit, and the vendor's library is faster
ALIGNMENT = 64  # of a weight's outputs and inputs
BUSY_PROGRAMS = 192  # programs that keep a GPU busy
MAX_SPLITS = 8
MIN_SPLIT_INPUTS = 512
FP8_CAPABILITY = (8, 9)  # of GPUs that have fp8 (Ada)


class TileSizes(NamedTuple):
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    early: int = 0  # inputs of a program, its last ones, whose weights are loaded before it waits


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    splits: int = 1,
    scales: Tensor | None = None,
) -> Tensor:
    """The same computation in plain PyTorch. The bias is in the first partial sum."""
    if scales is not None:
        scaled = weight.float() * scales[:, None]
        out = reference(x.float(), scaled, None if bias is None else bias.float(), splits)
        return out if splits > 1 else out.to(x.dtype)
    if splits == 1:
        return linear(x, weight, bias)
    parts = zip(x.float().chunk(splits, 1), weight.float().chunk(splits, 1), strict=True)
    out = torch.stack([linear(x_part, weight_part) for x_part, weight_part in parts])
    if bias is not None:
        out[0] += bias.float()
    return out


def supports_skinny_gemm(x: Tensor, weight: Tensor, gated: bool = False) -> bool:
    """Whether the kernel supports this product and is faster than the vendor's library."""
    if not uses_triton(x):
        return False
    narrow = x.element_size() == 2 or not x.is_cuda
    output_alignment = 2 * ALIGNMENT if gated else ALIGNMENT
    aligned = weight.shape[0] % output_alignment == weight.shape[1] % ALIGNMENT == 0
    return narrow and aligned and len(x) <= MAX_ROWS and x.stride(1) == weight.stride(1) == 1


def supports_weight_dtype(dtype: torch.dtype, device: torch.device) -> bool:
    if dtype != torch.float8_e4m3fn or device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def num_splits(weight: Tensor) -> int:
    """The number of programs that split the inputs of one output: the first that is enough."""
    outputs, inputs = weight.shape
    valid = [
        splits
        for splits in range(1, MAX_SPLITS + 1)
        if splits == 1
        or (inputs % (splits * ALIGNMENT) == 0 and inputs // splits >= MIN_SPLIT_INPUTS)
    ]
    blocks = outputs // ALIGNMENT
    return next((splits for splits in valid if splits * blocks >= BUSY_PROGRAMS), valid[-1])


if triton is not None:

    @triton.jit(do_not_specialize=["rows"])  # BLOCK_T tells enough of it
    def _skinny_gemm_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        weight_ptr,
        bias_ptr,
        scales_ptr,
        out_ptr,
        rows,
        stride_x_row,
        stride_weight_row,
        split_inputs,
        stride_out_split,
        stride_out_row,
        inner,
        GATED: tl.constexpr,
        BIAS: tl.constexpr,
        SCALED: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_K: tl.constexpr,
        EARLY: tl.constexpr,
        LATE: tl.constexpr,
        DEPENDENT: tl.constexpr,
    ):
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        split = tl.program_id(1)
        t = tl.arange(0, BLOCK_T)
        k = split * split_inputs + tl.arange(0, BLOCK_K)
        row_mask = (t < rows)[None, :]
        weight_tile_ptr = weight_ptr + n.to(tl.int64)[:, None] * stride_weight_row + k[None, :]
        late_inputs = split_inputs - EARLY
        up_offset = inner.to(tl.int64) * stride_weight_row
        if EARLY > 0:
            # In two halves, so that both find room in shared memory for their part of x.
            HALF: tl.constexpr = EARLY // 2
            early_k = split * split_inputs + late_inputs + tl.arange(0, HALF)
            early_ptr = weight_ptr + n.to(tl.int64)[:, None] * stride_weight_row + early_k[None, :]
            early_x_ptr = x_ptr + t[None, :] * stride_x_row + early_k[:, None]
            weight_0 = tl.load(early_ptr)
            weight_1 = tl.load(early_ptr + HALF)
            if GATED:
                up_weight_0 = tl.load(early_ptr + up_offset)
                up_weight_1 = tl.load(early_ptr + HALF + up_offset)
        wait_for_inputs(DEPENDENT)
        launch_next(DEPENDENT)
        x_tile_ptr = x_ptr + t[None, :] * stride_x_row + k[:, None]
        total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        if LATE:
            for start in range(0, late_inputs, BLOCK_K):
                x = tl.load(x_tile_ptr + start, mask=row_mask, other=0.0)
                weight = tl.load(weight_tile_ptr + start).to(x.dtype)
                total = tl.dot(weight, x, total, input_precision="ieee")
                if GATED:
                    up_weight = tl.load(weight_tile_ptr + start + up_offset).to(x.dtype)
                    up = tl.dot(up_weight, x, up, input_precision="ieee")
        if EARLY > 0:  # They come last, so that the order of a sum does not depend on EARLY.
            x = tl.load(early_x_ptr, mask=row_mask, other=0.0)
            total = tl.dot(weight_0.to(x.dtype), x, total, input_precision="ieee")
            if GATED:
                up = tl.dot(up_weight_0.to(x.dtype), x, up, input_precision="ieee")
            x = tl.load(early_x_ptr + HALF, mask=row_mask, other=0.0)
            total = tl.dot(weight_1.to(x.dtype), x, total, input_precision="ieee")
            if GATED:
                up = tl.dot(up_weight_1.to(x.dtype), x, up, input_precision="ieee")
        if SCALED:
            total *= tl.load(scales_ptr + n)[:, None]
            if GATED:
                up *= tl.load(scales_ptr + inner + n)[:, None]
        if BIAS:
            total += tl.where(split == 0, tl.load(bias_ptr + n).to(tl.float32), 0.0)[:, None]
        dtype = x_ptr.dtype.element_ty
        if GATED:
            gate = total.to(dtype).to(tl.float32)
            activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
            total = activated * up.to(dtype).to(tl.float32)
        tl.store(
            out_ptr + split * stride_out_split + t[None, :] * stride_out_row + n[:, None],
            total.to(out_ptr.dtype.element_ty),
            mask=row_mask,
        )


def skinny_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    tiles: TileSizes | None = None,
    splits: int | None = None,
) -> Tensor:
    """[T, N], or partial sums [S, T, N]. See `supports_skinny_gemm`."""
    splits = splits or num_splits(weight)
    n = len(weight)
    if splits == 1:
        out = torch.empty(len(x), n, dtype=x.dtype, device=x.device)
    else:
        out = torch.empty(splits, len(x), n, dtype=torch.float32, device=x.device)
    _launch(x, weight, bias, scales, out, False, tiles)
    return out


def gated_skinny_gemm(
    x: Tensor, weight: Tensor, scales: Tensor | None = None, tiles: TileSizes | None = None
) -> Tensor:
    """silu(x gate) * (x up), [T, I]. See `supports_skinny_gemm`."""
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, None, scales, out, True, tiles)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    out: Tensor,
    gated: bool,
    tiles: TileSizes | None,
) -> None:
    splits = len(out) if out.dim() == 3 else 1
    n = out.shape[-1]
    split_inputs = weight.shape[1] // splits
    block_t = max(16, triton.next_power_of_2(len(x)))
    tiles = tiles or tile_sizes(n * splits, split_inputs, block_t, gated)
    _skinny_gemm_kernel[(n // tiles.block_n, splits)](
        x,
        weight,
        x if bias is None else bias,
        x if scales is None else scales,
        out,
        len(x),
        x.stride(0),
        weight.stride(0),
        split_inputs,
        out.stride(0) if splits > 1 else 0,
        out.stride(-2),
        n if gated else 0,
        GATED=gated,
        BIAS=bias is not None,
        SCALED=scales is not None,
        BLOCK_T=block_t,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        EARLY=tiles.early,
        LATE=tiles.early < split_inputs,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,  # batch_invariant/gemm.py rounds a scaled sum before the bias, too
        **launch_options(x),
    )


def tile_sizes(outputs: int, split_inputs: int, block_t: int, gated: bool) -> TileSizes:
    """Sizes measured on an H200; `outputs` counts those of all splits.

    Small matrices get narrow tiles, many of which are loaded at once. With 64 rows, wide ones are
    faster, which read the rows less often: 2.99 instead of 4.35 microseconds in SmolLM2-135M.
    """
    if outputs // 64 < 96 and not gated and block_t == MAX_ROWS:
        return TileSizes(64, 64, num_warps=4, num_stages=6)
    if outputs // 64 < 96:
        return TileSizes(16, 64, 2, 8, early_inputs(256 if gated else 512, split_inputs))
    wide = split_inputs % 128 == 0 and (gated or block_t <= 32)
    block_k = 128 if wide else 64
    if gated:
        return TileSizes(64, block_k, num_warps=4, num_stages=3)
    if block_t > 16:
        return TileSizes(64, block_k, num_warps=4, num_stages=4 if wide else 6)
    if split_inputs < 1024:
        return TileSizes(64, block_k, 4, 3, early_inputs(512, split_inputs))
    return TileSizes(64, block_k, 4, 4 if wide else 6, early=256)


def early_inputs(wanted: int, split_inputs: int) -> int:
    """A power of 2 that is at most the number of inputs of a program."""
    return min(wanted, 1 << split_inputs.bit_length() - 1)
