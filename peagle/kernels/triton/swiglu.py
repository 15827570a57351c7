"""The gated activation of an MLP: silu(gate) * up, from the two projections side by side.

    gate_up (0 2 5 3)  ->  (silu(0) * 5, silu(2) * 3) = (0, 5.28)

Results are rounded where transformers rounds: silu in float32, its result in the tensor's dtype
before up multiplies it.

Shapes: gate_up [T, 2I], with the gate in the first half of a row. Result [T, I].
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from peagle.kernels.cpu import ops
from peagle.kernels.triton import uses_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the reference runs
    triton = None

MAX_BLOCK_COLUMNS = 1024


def reference(gate_up: Tensor) -> Tensor:
    """The same computation in plain PyTorch, whose silu computes in float32 and rounds once."""
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up


if triton is not None:

    @triton.jit
    def _swiglu_kernel(  # type: ignore[no-untyped-def]
        gate_up_ptr, out_ptr, stride_row, INNER: tl.constexpr, BLOCK_COLS: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
        mask = cols < INNER
        row_ptr = gate_up_ptr + row * stride_row
        gate = tl.load(row_ptr + cols, mask=mask, other=0.0)
        up = tl.load(row_ptr + INNER + cols, mask=mask, other=0.0)
        wide = gate.to(tl.float32)
        activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
        result = (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
        tl.store(out_ptr + row * INNER + cols, result, mask=mask)


def swiglu(gate_up: Tensor) -> Tensor:
    """Rows of gate_up may lie apart, but must be contiguous."""
    if not uses_triton(gate_up):
        result = ops.swiglu(gate_up)
        return reference(gate_up) if result is None else result
    rows = gate_up.shape[0]
    inner = gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1 and gate_up.shape[1] == 2 * inner
    out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    block = min(MAX_BLOCK_COLUMNS, triton.next_power_of_2(inner))
    _swiglu_kernel[(rows, triton.cdiv(inner, block))](
        gate_up, out, gate_up.stride(0), INNER=inner, BLOCK_COLS=block
    )
    return out
