"""Programmatic dependent launch: a kernel starts while the kernel in front of it still runs.

A step at low load is a chain of short kernels. Without overlap, each of them waits for the last
program of its predecessor, is launched, and only then begins to read its weights. Here a kernel
launches its successor as soon as all of its own programs run. The successor fetches what no kernel
writes, its weights, into the L2 cache, and waits for its inputs after that:

    kernel 1   |launch_next|wait|  work  |
    kernel 2        |launch_next| prefetch |......wait|  work  |

Every program of a kernel that is launched with `launch_options` must call `wait_for_inputs` before
it reads or writes anything that another kernel of the step writes or reads. As kernel 2 then ends
after kernel 1, kernel 3 may rely on both.

Needs compute capability 9.0 (Hopper). Elsewhere, and in Triton's interpreter, DEPENDENT is False
and kernels run one after another.
"""

from functools import cache

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # without Triton the references run
    triton = None

MIN_CAPABILITY = (9, 0)
MODE = 2


@cache
def supports_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def launch_options(x: Tensor) -> dict[str, bool]:
    """The arguments of a launch on x's device: the constant DEPENDENT, and Triton's own option."""
    if supports_dependent_launch(x.device):
        return {"DEPENDENT": MODE, "launch_pdl": True}
    return {"DEPENDENT": False}


if triton is not None:

    @triton.jit
    def launch_next(DEPENDENT: tl.constexpr, PLACE: tl.constexpr = 1):  # type: ignore[no-untyped-def]
        """Let the next kernel start as soon as all programs of this one have called this."""
        if DEPENDENT & PLACE:
            gdc_launch_dependents()

    @triton.jit
    def wait_for_inputs(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
        """Wait until all kernels in front of this one have ended and their results are visible."""
        if DEPENDENT:
            gdc_wait()

    @triton.jit
    def prefetch_rows(ptr, num_bytes, DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
        """Fetch num_bytes behind each pointer into L2; both are multiples of 16 bytes."""
        if DEPENDENT:
            tl.inline_asm_elementwise(
                asm="cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
                constraints="=r,l,r",
                args=[ptr.to(tl.int64), tl.zeros_like(ptr.to(tl.int64)).to(tl.int32) + num_bytes],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
