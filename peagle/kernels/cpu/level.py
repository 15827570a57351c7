"""The instruction sets that the C kernels can be compiled for.

`native` is whatever this CPU has. PEAGLE_CPU_LEVEL forces a lower level, to test or to compare it.
"""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LEVEL_VARIABLE = "PEAGLE_CPU_LEVEL"
AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")


@dataclass(frozen=True)
class CpuLevel:
    name: str
    flags: tuple[str, ...]  # of gcc 9 and newer, and clang
    needs: tuple[str, ...] = ()  # features of the CPU, as /proc/cpuinfo names them


NATIVE = CpuLevel("native", ("-march=native",))
X86_LEVELS = (
    NATIVE,
    CpuLevel("avx512", tuple(f"-m{name}" for name in AVX512), AVX512),
    CpuLevel("avx2", tuple(f"-m{name}" for name in AVX2), AVX2),
    CpuLevel("baseline", ("-march=x86-64",)),
)
ARM_LEVELS = (NATIVE, CpuLevel("baseline", ("-march=armv8-a",)))
OTHER_LEVELS = (NATIVE, CpuLevel("baseline", ()))


def machine_levels(machine: str, features: set[str]) -> list[CpuLevel]:
    """The levels that a CPU with these features supports, the best first."""
    is_x86 = machine.lower() in ("x86_64", "amd64")
    is_arm = machine.lower() in ("aarch64", "arm64")
    levels = X86_LEVELS if is_x86 else ARM_LEVELS if is_arm else OTHER_LEVELS
    return [level for level in levels if features.issuperset(level.needs)]


def supported_levels() -> list[CpuLevel]:
    return machine_levels(platform.machine(), set(cpu_features().split()))


def chosen_level(environment: Mapping[str, str] = os.environ) -> CpuLevel:
    """The level that PEAGLE_CPU_LEVEL names. ValueError if this CPU does not support it."""
    name = environment.get(LEVEL_VARIABLE) or NATIVE.name
    levels = {level.name: level for level in supported_levels()}
    if name not in levels:
        raise ValueError(
            f"{LEVEL_VARIABLE}={name} is not supported by this CPU, only {', '.join(levels)}"
        )
    return levels[name]


@cache
def cpu_features() -> str:
    """What the kernel lists as the features of the first CPU; empty where it lists nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return line.partition(":")[2].strip()
