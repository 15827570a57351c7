"""This machine: the name of its CPU, its cores, and whether it has a GPU; torch is not asked."""

import os
import platform
from contextlib import suppress
from pathlib import Path

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # Of a container: CPU time in a period, period.
# Of NVIDIA's driver, on Linux and in WSL.
GPU_FILES = tuple(map(Path, ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")))


def cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def available_cores() -> int | None:
    """The cores that this process may run on, for records of measurements."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def usable_cores() -> int:
    """The cores that this process may run on, or fewer if its container has a CPU quota."""
    cores = available_cores() or 1
    with suppress(OSError, ValueError):  # "max 100000": no quota.
        quota, period = CPU_QUOTA.read_text().split()
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def has_visible_gpu() -> bool:
    """CUDA_VISIBLE_DEVICES hides all GPUs if it is empty or begins with -1."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and visible.split(",")[0].strip() in ("", "-1")
    return not hidden and any(file.exists() for file in GPU_FILES)
