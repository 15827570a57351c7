"""Overlap of consecutive kernels, by programmatic dependent launch (Hopper and later GPUs).

A kernel of a decode step is short, and the GPU is idle for about a microsecond between two of them.
With overlap, the programs of a kernel start while the one before it still runs, and wait for its
end before they touch memory. They may prefetch weights meanwhile.

    kernel 1   ...............|
    kernel 2             start wait|..............|
    kernel 3                             start wait|.......

Each kernel waits before anything else, so that all kernels before it have ended, not only the last.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # without Triton no kernel runs
    triton = None

OVERLAP_CAPABILITY = (9, 0)
PREFETCH_BYTES = 1024  # of each matrix row that a program multiplies
CACHE_LINE = 128


def overlap_options(x: Tensor) -> dict[str, Any]:
    """Arguments of a launch: OVERLAP of the kernel, and the option of the launch itself."""
    if x.is_cuda and supports_overlap(x.device):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@cache
def supports_overlap(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= OVERLAP_CAPABILITY


if triton is not None:

    @triton.jit
    def wait_for_previous(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
        """Wait for the end of the kernel before this one, and let the next one start."""
        if OVERLAP:
            gdc_wait()
            gdc_launch_dependents()

    @triton.jit
    def prefetch_rows(row_ptr, LINES: tl.constexpr, OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
        """Prefetch the first cache lines of the rows [N] that begin at these addresses."""
        if OVERLAP:
            line_ptr = row_ptr.to(tl.int64)[:, None] + tl.arange(0, LINES)[None, :] * 128
            tl.inline_asm_elementwise(
                asm="prefetch.global.L2 [$1]; mov.b32 $0, 0;",
                constraints="=r,l",
                args=[line_ptr],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


def prefetch_lines(row_bytes: int) -> int:
    """The number of cache lines to prefetch of a row of so many bytes: a power of 2."""
    lines = min(row_bytes, PREFETCH_BYTES) // CACHE_LINE
    return 1 << max(lines.bit_length() - 1, 0)
