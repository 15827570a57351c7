"""Programmatic dependent launch: a kernel starts while the kernel in front of it still runs.

A step at low load is a chain of short kernels. Without overlap, each of them is launched when the
last program of its predecessor has ended. Here a kernel lets its successor be launched as soon as
it has its own inputs, and the programs of the successor wait for theirs:

    kernel 1   wait | launch_next | work            |
    kernel 2                      | start, wait ... | launch_next | work
    kernel 3                                                      | start, wait ...

Every program of a kernel that is launched with `launch_options` must call `wait_for_inputs` before
it reads or writes anything that another kernel of the step writes or reads. As kernel 2 then ends
after kernel 1, kernel 3 may rely on both. Successors that start earlier, before a kernel has its
own inputs, take places on multiprocessors and make others run with too few programs: layers of
GPT-OSS-20B became 15 % slower. For the same reason experts launch their successor when they have
read their matrices.

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
# Kernels that let their successor start before they have their own inputs.
EARLY_KERNELS = {"add_norm", "rope_store", "attention", "route", "gate_up"}


@cache
def supports_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def launch_options(x: Tensor, kernel: str = "") -> dict[str, int]:
    """The arguments of a launch on x's device: the constant DEPENDENT, and Triton's own option."""
    if supports_dependent_launch(x.device):
        return {"DEPENDENT": 2 if kernel in EARLY_KERNELS else 1, "launch_pdl": True}
    return {"DEPENDENT": 0}


if triton is not None:

    @triton.jit
    def launch_next_early(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
        """Let the next kernel load its weights while this one waits for its own inputs."""
        if DEPENDENT == 2:
            gdc_launch_dependents()

    @triton.jit
    def launch_next(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
        """Let the next kernel start as soon as all programs of this one have called this."""
        if DEPENDENT == 1:
            gdc_launch_dependents()

    @triton.jit
    def wait_for_inputs(DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
        """Wait until all kernels in front of this one have ended and their results are visible."""
        if DEPENDENT > 0:
            gdc_wait()
