"""The GPU, or why there is none."""

import os
from dataclasses import dataclass

import torch

from peagle.bench.environment import gpu_driver
from peagle.doctor.software import installed_version
from peagle.paths import TRITON_CACHE_VARIABLE, keep_triton_cache


@dataclass(frozen=True, slots=True)
class GpuFacts:
    name: str | None
    memory_bytes: int | None
    free_bytes: int | None
    driver: str | None
    cuda: str | None  # the version that PyTorch is built for
    triton: str | None
    reason: str | None  # why no GPU is used, or not its full speed
    triton_cache: str | None = None  # the folder of compiled kernels; None: Triton's own


def gpu_facts() -> GpuFacts:
    driver = gpu_driver()
    triton = installed_version("triton")
    cuda = torch.version.cuda
    if not torch.cuda.is_available():
        return GpuFacts(None, None, None, driver, cuda, triton, missing_reason(driver, cuda))
    free, total = torch.cuda.mem_get_info()
    reason = None
    if triton is None:
        reason = "triton is not installed: kernels run in PyTorch (pip install triton)"
    name = torch.cuda.get_device_name()
    return GpuFacts(name, total, free, driver, cuda, triton, reason, triton_cache())


def triton_cache() -> str | None:
    environment = dict(os.environ)
    keep_triton_cache(environment)
    return environment.get(TRITON_CACHE_VARIABLE)


def missing_reason(driver: str | None, cuda: str | None) -> str:
    if driver is None:
        return "no NVIDIA driver found (nvidia-smi): there is no GPU, or its driver is missing"
    if cuda is None:
        return "this PyTorch is built without CUDA: install one that is (pytorch.org)"
    return f"PyTorch (CUDA {cuda}) cannot use the GPU of driver {driver}: update the driver"
