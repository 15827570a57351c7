"""The product of a few rows with a matrix: what a step is made of.

Every weight is read once for a handful of rows, so the memory sets the pace. A program takes some rows of the matrix.
Where there are too few of them to keep a GPU busy, several programs share the columns, and whoever reads the result
adds the shares up on the way (add_norm, rope_store): no launch of its own for that. The gate of an MLP opens in the
launch that computes it.

In which order a number is summed depends on the matrix alone, not on how many rows there are.

A weight in 8 bits (int8 or fp8, with a scale for each row of it) is half as much to read: it becomes x's dtype on the
way to the product, exactly, and its scale meets the sum.

Shapes: x [T, K], weight [N, K], bias and scales [N]. Result [T, N], or shares [S, T, N] in float32. Gated: weight
[2I, K] with the gate's rows first, result [T, I]; rounded where swiglu rounds.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without it uses the reference
    triton = None

MAX_ROWS = (
    64  # rows: with more, arithmetic sets the pace, and the library's own product is the faster one
)
ALIGNED = 64  # rows and columns of the matrix come in such pieces
TILES, MOST_SHARES, LEAST = (
    192,
    4,
    512,
)  # programs that keep a GPU busy; shares of the columns; columns of a share


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    shares: int = 1,
    scales: Tensor | None = None,
) -> Tensor:
    """What the kernel computes, in plain PyTorch. The bias is in the first share."""
    if scales is not None:
        wide = weight.float() * scales[:, None]
        out = reference(x.float(), wide, None if bias is None else bias.float(), shares)
        return out if shares > 1 else out.to(x.dtype)
    if shares == 1:
        return linear(x, weight, bias)
    parts = zip(x.float().chunk(shares, 1), weight.float().chunk(shares, 1), strict=True)
    out = torch.stack([linear(a, b) for a, b in parts])
    if bias is not None:
        out[0] += bias.float()
    return out


def fits(x: Tensor, weight: Tensor, halves: int = 1) -> bool:
    """Can the kernel do it, and should it? `halves`: of the matrix, 2 if it is gated."""
    if triton is None or not (x.is_cuda or triton.knobs.runtime.interpret):
        return False
    narrow = x.element_size() == 2 or not x.is_cuda
    aligned = weight.shape[0] % (halves * ALIGNED) == weight.shape[1] % ALIGNED == 0
    return narrow and aligned and len(x) <= MAX_ROWS and x.stride(1) == weight.stride(1) == 1


def reads(kind: torch.dtype, device: torch.device) -> bool:
    """Weights of that kind: GPUs know fp8 from Ada on."""
    return (
        kind != torch.float8_e4m3fn
        or device.type != "cuda"
        or torch.cuda.get_device_capability(device) >= (8, 9)
    )


def shares_of(weight: Tensor) -> int:
    """Programs that share a row of the matrix."""
    tiles, columns, shares = weight.shape[0] // ALIGNED, weight.shape[1], 1
    while tiles * shares < TILES and shares < MOST_SHARES and columns % (4 * shares * ALIGNED) == 0:
        if columns // (2 * shares) < LEAST:
            break
        shares *= 2
    return shares


if triton is not None:

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        x,
        weight,
        bias,
        scales,
        out,
        rows,
        x_row,
        weight_row,
        columns,
        out_share,
        out_row,
        inner,
        GATED: tl.constexpr,
        BIAS: tl.constexpr,
        SCALED: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_K: tl.constexpr,
    ):
        n, share = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1)
        t, k = tl.arange(0, BLOCK_T), share * columns + tl.arange(0, BLOCK_K)
        there = (t < rows)[None, :]
        mine = weight + n.to(tl.int64)[:, None] * weight_row + k[None, :]
        other = mine + inner.to(tl.int64) * weight_row
        theirs = x + t[None, :] * x_row + k[:, None]
        total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for at in range(0, columns, BLOCK_K):
            state = tl.load(theirs + at, mask=there, other=0.0)
            total = tl.dot(tl.load(mine + at).to(state.dtype), state, total, input_precision="ieee")
            if GATED:
                up = tl.dot(tl.load(other + at).to(state.dtype), state, up, input_precision="ieee")
        if SCALED:
            total *= tl.load(scales + n)[:, None]
            if GATED:
                up *= tl.load(scales + inner + n)[:, None]
        if BIAS:
            total += tl.where(share == 0, tl.load(bias + n).to(tl.float32), 0.0)[:, None]
        dtype = x.dtype.element_ty
        if GATED:
            gate = total.to(dtype).to(tl.float32)
            opened = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
            total = opened * up.to(dtype).to(tl.float32)
        tl.store(
            out + share * out_share + t[None, :] * out_row + n[:, None],
            total.to(out.dtype.element_ty),
            mask=there,
        )


def skinny_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """[T, N], or shares of it [S, T, N]. For what `fits`."""
    shares, n = shares_of(weight), len(weight)
    if shares == 1:
        out = torch.empty(len(x), n, dtype=x.dtype, device=x.device)
    else:
        out = torch.empty(shares, len(x), n, dtype=torch.float32, device=x.device)
    _launch(x, weight, bias, scales, out, shares, False)
    return out


def gated_skinny_gemm(x: Tensor, weight: Tensor, scales: Tensor | None = None) -> Tensor:
    """silu(x gate) * (x up), [T, I]. For what `fits` in two halves."""
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, None, scales, out, 1, True)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    out: Tensor,
    shares: int,
    gate: bool,
) -> None:
    n, columns = len(weight) // (2 if gate else 1), weight.shape[1] // shares
    block_t = max(16, triton.next_power_of_2(len(x)))
    sizes = blocks(n * shares, columns, block_t, gate)
    _kernel[(n // sizes["BLOCK_N"], shares)](
        x,
        weight,
        x if bias is None else bias,
        x if scales is None else scales,
        out,
        len(x),
        x.stride(0),
        weight.stride(0),
        columns,
        out.stride(0) if shares > 1 else 0,
        out.stride(-2),
        n if gate else 0,
        GATED=gate,
        BIAS=bias is not None,
        SCALED=scales is not None,
        BLOCK_T=block_t,
        **sizes,
    )


def blocks(programs: int, columns: int, block_t: int, gate: bool) -> dict[str, Any]:
    """Measured on an H200: for small matrices narrow blocks, many of them on their way at once."""
    if programs // 64 < 96:
        return {"BLOCK_N": 16, "BLOCK_K": 64, "num_warps": 2, "num_stages": 8}
    block_k = 128 if columns % 128 == 0 and block_t <= 16 else 64
    return {"BLOCK_N": 64, "BLOCK_K": block_k, "num_warps": 4, "num_stages": 3 if gate else 4}
