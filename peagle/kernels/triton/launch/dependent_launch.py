"""Programmatic dependent launch: a kernel starts while the kernel in front of it still runs.

A step at low load is a chain of short kernels. Without overlap, each of them is launched when the
last program of its predecessor has ended. Here a kernel lets its successor be launched as soon as
it has its own inputs, and the programs of the successor wait for theirs:

    kernel 1   wait | launch_next | work            |
    kernel 2                      | start, wait ... | launch_next | work
    kernel 3                                                      | start, wait ...

Every program of a kernel that is launched with `launch_options` must call `wait_for_inputs` before
it writes anything, and before it reads what the kernel in front writes; one that does neither may
leave without, but not all of them. As kernel 2 then ends after kernel 1, kernel 3 may rely on both.
What is older, such as weights and the rows of a pass, may be read before: products load weights
while they wait, rotation and attention look up their rows. In a layer of Qwen3-30B-A3B with one
row, this saves 6 of 54 microseconds.

Successors that start earlier, before a kernel has its own inputs, take places on multiprocessors
and make others run with too few programs: layers of GPT-OSS-20B became 15 % slower. For the same
reason experts launch their successor when they have read their matrices. Only the norms of narrow
models do so (add_norm.py).

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


@cache
def supports_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def launch_options(x: Tensor) -> dict[str, bool]:
    """The arguments of a launch on x's device: the constant DEPENDENT, and Triton's own option."""
    if supports_dependent_launch(x.device):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}


if triton is not None:

    @triton.jit
    def launch_next(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
        """Let the next kernel start as soon as all programs of this one have called this."""
        if DEPENDENT:
            gdc_launch_dependents()

    @triton.jit
    def wait_for_inputs(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
        """Wait until all kernels in front of this one have ended and their results are visible."""
        if DEPENDENT:
            gdc_wait()
