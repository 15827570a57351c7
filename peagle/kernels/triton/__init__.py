"""The Triton kernels of the engine, each beside its plain PyTorch reference."""

import os

from torch import Tensor

from peagle.paths import keep_triton_cache

keep_triton_cache(os.environ)
try:
    import triton
except ImportError:
    triton = None


def uses_triton(x: Tensor) -> bool:
    """Whether kernels on this tensor run in Triton: on a GPU, or in Triton's interpreter."""
    return triton is not None and (x.is_cuda or triton.knobs.runtime.interpret)
