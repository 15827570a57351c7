"""The CPU, the kernels that run on it, and what keeps better ones from running."""

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from peagle.kernels.cpu import library
from peagle.kernels.cpu.level import LEVEL_VARIABLE, cpu_features
from peagle.machine import available_cores, cpu_name
from peagle.target.weight_speed import last_level_cache_bytes

X86_FLAGS = (
    *("f16c", "fma", "avx2"),
    *("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"),
)
ARM_FLAGS = ("asimd", "asimddp", "bf16")
WITHOUT_KERNELS = (
    "norms, attention and products of few rows run in PyTorch, weights of GGUF files are widened,"
    " and int8 is not available"
)


@dataclass(frozen=True, slots=True)
class CpuFacts:
    model: str
    architecture: str
    flags: tuple[str, ...]  # those that the kernels use
    cores: int  # that this process may use
    threads: int  # that PyTorch and the kernels use
    cache_bytes: int  # of the last level


@dataclass(frozen=True, slots=True)
class Limitation:
    """Why something better does not run here."""

    reason: str
    loss: str
    fix: str | None = None  # None: only another machine would help


@dataclass(frozen=True, slots=True)
class KernelFacts:
    state: str  # as `engine.status()["kernels"]`
    build: dict[str, Any]  # level, instruction set, vector width, compiler; empty without kernels
    limitations: tuple[Limitation, ...]


def cpu_facts() -> CpuFacts:
    features = set(cpu_features().split())
    return CpuFacts(
        model=cpu_name(),
        architecture=platform.machine(),
        flags=tuple(flag for flag in (*X86_FLAGS, *ARM_FLAGS) if flag in features),
        cores=available_cores() or 1,
        threads=torch.get_num_threads(),
        cache_bytes=last_level_cache_bytes(),
    )


def kernel_facts(cpu: CpuFacts, environment: Mapping[str, str] = os.environ) -> KernelFacts:
    state = library.kernel_state()
    return KernelFacts(state, build_facts(), tuple(limitations(state, cpu, environment)))


def build_facts() -> dict[str, Any]:
    """The record of what was compiled; empty without kernels."""
    build = library.kernel_build()
    return asdict(build) if build is not None else {}


def limitations(state: str, cpu: CpuFacts, environment: Mapping[str, str]) -> list[Limitation]:
    return [
        *library_limitations(state, environment),
        *(cpu_limitations(cpu) if not state.startswith("pytorch") else []),
        *thread_limitations(cpu, environment),
    ]


def library_limitations(state: str, environment: Mapping[str, str]) -> list[Limitation]:
    reasons = []
    if environment.get("PEAGLE_NATIVE") == "0":
        reasons.append(Limitation("PEAGLE_NATIVE=0", WITHOUT_KERNELS, "unset PEAGLE_NATIVE"))
    elif state.startswith("pytorch"):
        reason = state.partition(": ")[2]
        fix = "install gcc 9 or newer, or clang (Debian, Ubuntu: apt install gcc libc6-dev)"
        if LEVEL_VARIABLE in reason:
            fix = f"unset {LEVEL_VARIABLE}"
        reasons.append(Limitation(reason, WITHOUT_KERNELS, fix))
    level = environment.get(LEVEL_VARIABLE)
    if level and level != "native" and state.startswith("c"):
        reason = f"{LEVEL_VARIABLE}={level}"
        loss = "kernels do not use every instruction of this CPU"
        reasons.append(Limitation(reason, loss, f"unset {LEVEL_VARIABLE}"))
    return reasons


def cpu_limitations(cpu: CpuFacts) -> list[Limitation]:
    """Instructions that this CPU lacks; for the widest vectors only the first one is named."""
    flags = set(cpu.flags)
    if "asimd" in flags:
        return [
            Limitation(f"this CPU has no {flag}", loss)
            for flag, loss in (
                ("asimddp", "products of int8 take more instructions"),
                ("bf16", "products of bf16 are computed in float32"),
            )
            if flag not in flags
        ]
    if "avx2" not in flags:
        return [Limitation("this CPU has no avx2", "vectors have 128 bits instead of 256 or 512")]
    if "avx512f" not in flags:
        return [Limitation("this CPU has no avx512f", "vectors have 256 bits instead of 512")]
    return [
        Limitation(f"this CPU has no {flag}", loss)
        for flag, loss in (
            ("avx512_bf16", "products of bf16 are computed in float32"),
            ("avx512_vnni", "products of int8 take more instructions"),
        )
        if flag not in flags
    ]


def thread_limitations(cpu: CpuFacts, environment: Mapping[str, str]) -> list[Limitation]:
    if cpu.threads >= cpu.cores:
        return []
    setting = environment.get("OMP_NUM_THREADS")
    reason = f"{cpu.threads} of {cpu.cores} cores are used"
    fix = "unset OMP_NUM_THREADS" if setting else f"set OMP_NUM_THREADS={cpu.cores}"
    return [Limitation(reason, "the other cores are idle", fix)]
