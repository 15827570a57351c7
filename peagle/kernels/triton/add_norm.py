"""The residual sum and the RMSNorm behind it, in one launch: one program a row.

Rounds where transformers' LlamaRMSNorm rounds: the sum in the tensors' dtype, the norm in float32, its result in the
tensors' dtype again before the weight multiplies it.

Shapes: x and residual [T, d], weight [d]. Results: normed [T, d], and residual_out [T, d] = x + residual. x may come in
shares [S, T, d] (few_rows.py): they are added up first.
"""

import torch
from torch import Tensor

from peagle.kernels.cpu import ops

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without it uses the reference
    triton = None


def reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What the kernel computes, in plain PyTorch."""
    x = x if x.dim() == 2 else x.sum(0).to(weight.dtype)
    total = x if residual is None else x + residual
    wide = total.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = (weight * scaled.to(x.dtype)).to(x.dtype)
    return normed if out is None else out.copy_(normed), total


if triton is not None:

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        x,
        residual,
        weight,
        normed,
        total,
        eps,
        x_share,
        x_row,
        residual_row,
        normed_row,
        total_row,
        D: tl.constexpr,
        BLOCK: tl.constexpr,
        SUM: tl.constexpr,
        SHARES: tl.constexpr,
    ):
        row, dims = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        there = dims < D
        mine = tl.load(x + row * x_row + dims, mask=there, other=0.0)
        for share in tl.static_range(1, SHARES):
            mine += tl.load(x + share * x_share + row * x_row + dims, mask=there, other=0.0)
        mine = mine.to(normed.dtype.element_ty)
        if SUM:
            before = tl.load(residual + row * residual_row + dims, mask=there, other=0.0)
            mine = (mine.to(tl.float32) + before.to(tl.float32)).to(mine.dtype)
        if SUM or SHARES > 1:
            tl.store(total + row * total_row + dims, mine, mask=there)
        wide = mine.to(tl.float32)
        scaled = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)).to(mine.dtype)
        gain = tl.load(weight + dims, mask=there, other=0.0)
        result = (gain.to(tl.float32) * scaled.to(tl.float32)).to(mine.dtype)
        tl.store(normed + row * normed_row + dims, result, mask=there)


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(normed, residual_out); residual_out is x itself where residual is None and x is whole.

    `out` takes normed. Rows of x, residual and out may lie apart; their last dimension must be contiguous.
    """
    if triton is None or not (x.is_cuda or triton.knobs.runtime.interpret):
        found = ops.add_norm(x, residual, weight, eps, out) if x.dim() == 2 else None
        return reference(x, residual, weight, eps, out) if found is None else found
    (rows, d), shares = x.shape[-2:], len(x) if x.dim() == 3 else 1
    normed = torch.empty(rows, d, dtype=weight.dtype, device=x.device) if out is None else out
    total = (
        x
        if residual is None and shares == 1
        else torch.empty(rows, d, dtype=weight.dtype, device=x.device)
    )
    before = normed if residual is None else residual
    assert x.stride(-1) == before.stride(1) == normed.stride(1) == weight.stride(0) == 1
    assert (
        x.shape[-2:] == before.shape == normed.shape
        and before.dtype == normed.dtype == weight.dtype
    )
    block = triton.next_power_of_2(d)
    _kernel[(rows,)](
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
        BLOCK=block,
        SUM=residual is not None,
        SHARES=shares,
        num_warps=min(max(block // 256, 1), 16),
    )
    return normed, total
