"""The residual sum and the RMSNorm behind it, in one launch: a program computes one row.

    total = x + residual
    normed = weight * total / sqrt(mean(total^2) + eps)

    x (1 2), residual (2 2), weight (1 1), eps 0  ->  total (3 4), normed (0.85 1.13)

Results are rounded where transformers' LlamaRMSNorm rounds: the sum in the tensors' dtype, the norm
in float32, and its result in the tensors' dtype again before the weight multiplies it.

Shapes: x and residual [T, d], weight [d]. Results: normed and total [T, d]. x may come as partial
sums [S, T, d] (skinny_gemm.py), which are added first.
"""

import torch
from torch import Tensor

from peagle.kernels.cpu import ops
from peagle.kernels.triton import uses_triton
from peagle.kernels.triton.launch.dependent_launch import launch_options

try:
    import triton
    import triton.language as tl

    from peagle.kernels.triton.launch.dependent_launch import launch_next, wait_for_inputs
except ImportError:  # without Triton the reference runs
    triton = None

# The product behind it is launched before it has its own inputs, and loads its weights: with few
# rows of a narrow model, whose matrices are small, this is faster.
NARROW = 1024
FEW_ROWS = 16


def reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same computation in plain PyTorch."""
    x = x if x.dim() == 2 else x.sum(0).to(weight.dtype)
    total = x if residual is None else x + residual
    wide = total.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = (weight * scaled.to(x.dtype)).to(x.dtype)
    return normed if out is None else out.copy_(normed), total


if triton is not None:

    @triton.jit
    def _add_norm_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        residual_ptr,
        weight_ptr,
        normed_ptr,
        total_ptr,
        eps,
        stride_x_split,
        stride_x_row,
        stride_residual_row,
        stride_normed_row,
        stride_total_row,
        D: tl.constexpr,
        BLOCK_D: tl.constexpr,
        RESIDUAL: tl.constexpr,
        SPLITS: tl.constexpr,
        LAUNCH_EARLY: tl.constexpr,
        DEPENDENT: tl.constexpr,
    ):
        if LAUNCH_EARLY:
            launch_next(DEPENDENT)
        row = tl.program_id(0).to(tl.int64)
        dims = tl.arange(0, BLOCK_D)
        mask = dims < D
        weight = tl.load(weight_ptr + dims, mask=mask, other=0.0)
        wait_for_inputs(DEPENDENT)
        if not LAUNCH_EARLY:
            launch_next(DEPENDENT)
        x_row_ptr = x_ptr + row * stride_x_row + dims
        total = tl.load(x_row_ptr, mask=mask, other=0.0)
        for split in tl.static_range(1, SPLITS):
            total += tl.load(x_row_ptr + split * stride_x_split, mask=mask, other=0.0)
        total = total.to(normed_ptr.dtype.element_ty)
        if RESIDUAL:
            residual = tl.load(
                residual_ptr + row * stride_residual_row + dims, mask=mask, other=0.0
            )
            total = (total.to(tl.float32) + residual.to(tl.float32)).to(total.dtype)
        if RESIDUAL or SPLITS > 1:
            tl.store(total_ptr + row * stride_total_row + dims, total, mask=mask)
        wide = total.to(tl.float32)
        scaled = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)).to(total.dtype)
        normed = (weight.to(tl.float32) * scaled.to(tl.float32)).to(total.dtype)
        tl.store(normed_ptr + row * stride_normed_row + dims, normed, mask=mask)


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(normed, total); total is x itself if there is no residual and x is no partial sum.

    `out` takes normed. Rows of x, residual and out may lie apart, but must be contiguous.
    """
    if not uses_triton(x):
        result = ops.add_norm(x, residual, weight, eps, out) if x.dim() == 2 else None
        return reference(x, residual, weight, eps, out) if result is None else result
    rows, d = x.shape[-2:]
    splits = len(x) if x.dim() == 3 else 1
    normed = torch.empty(rows, d, dtype=weight.dtype, device=x.device) if out is None else out
    total = x
    if residual is not None or splits > 1:
        total = torch.empty(rows, d, dtype=weight.dtype, device=x.device)
    before = normed if residual is None else residual
    assert x.stride(-1) == before.stride(1) == normed.stride(1) == weight.stride(0) == 1
    assert x.shape[-2:] == before.shape == normed.shape
    assert before.dtype == normed.dtype == weight.dtype
    block_d = triton.next_power_of_2(d)
    _add_norm_kernel[(rows,)](
        x,
        before,
        weight,
        normed,
        total,
        eps,
        x.stride(0),
        x.stride(-2),
        before.stride(0),
        normed.stride(0),
        total.stride(-2),
        D=d,
        BLOCK_D=block_d,
        RESIDUAL=residual is not None,
        SPLITS=splits,
        LAUNCH_EARLY=d <= NARROW and rows <= FEW_ROWS,
        num_warps=min(max(block_d // 256, 1), 16),
        **launch_options(x),
    )
    return normed, total
