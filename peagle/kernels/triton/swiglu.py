"""The gate of an MLP: silu(gate) * up, from the two projections side by side.

Rounds where transformers rounds: silu in float32, its result in the tensor's dtype before up multiplies it.

Shapes: gate_up [T, 2I], gate in the first half of a row. Result [T, I].
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from peagle.kernels.cpu import ops

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without it uses the reference
    triton = None

BLOCK = 1024  # columns of a program


def reference(gate_up: Tensor) -> Tensor:
    """What the kernel computes, in plain PyTorch."""
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up  # PyTorch's silu computes in float32 and rounds once


if triton is not None:

    @triton.jit
    def _kernel(gate_up, out, row_stride, INNER: tl.constexpr, BLOCK_COLS: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        there = cols < INNER
        gate = tl.load(gate_up + row * row_stride + cols, mask=there, other=0.0)
        up = tl.load(gate_up + row * row_stride + INNER + cols, mask=there, other=0.0)
        wide = gate.to(tl.float32)
        opened = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
        result = (opened.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
        tl.store(out + row * INNER + cols, result, mask=there)


def swiglu(gate_up: Tensor) -> Tensor:
    """Rows of gate_up may lie apart; its last dimension must be contiguous."""
    if triton is None or not (gate_up.is_cuda or triton.knobs.runtime.interpret):
        found = ops.swiglu(gate_up)
        return reference(gate_up) if found is None else found
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1 and gate_up.shape[1] == 2 * inner
    out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    block = min(BLOCK, triton.next_power_of_2(inner))
    _kernel[(rows, triton.cdiv(inner, block))](
        gate_up, out, gate_up.stride(0), INNER=inner, BLOCK_COLS=block
    )
    return out
