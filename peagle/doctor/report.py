"""DoctorReport: everything that `peagle doctor` shows."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peagle.catalog.pair import Pair
from peagle.doctor.cpu import CpuFacts, KernelFacts, cpu_facts, kernel_facts
from peagle.doctor.gpu import GpuFacts, gpu_facts
from peagle.doctor.software import (
    DiskFacts,
    MemoryFacts,
    SoftwareFacts,
    disk_facts,
    memory_facts,
    software_facts,
)
from peagle.pull.pull import target_folder
from peagle.pull.receipt import has_stored, receipt
from peagle.target.gguf.choice import choose_weights
from peagle.target.matrix_shapes import read_shapes
from peagle.target.precision import SpeedChoice

GB = 1e9
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class DoctorReport:
    cpu: CpuFacts
    kernels: KernelFacts
    pair: str  # whose target the choice holds for
    choice: SpeedChoice  # of dtype "auto" on the CPU
    shapes_note: str | None  # set if the times are those of other shapes than the pair's
    gpu: GpuFacts
    memory: MemoryFacts
    disk: DiskFacts
    software: SoftwareFacts

    def as_dict(self) -> dict[str, Any]:
        parts = ("cpu", "kernels", "gpu", "memory", "disk", "software")
        return {
            **{name: asdict(getattr(self, name)) for name in parts},
            "auto": {"pair": self.pair, "note": self.shapes_note, **self.choice.as_dict()},
        }

    def lines(self) -> list[tuple[str, str]]:
        """A heading, empty for a line that continues the one before, and what it says."""
        return [
            *cpu_lines(self.cpu),
            *kernel_lines(self.kernels),
            *choice_lines(self.pair, self.choice, self.shapes_note),
            *gpu_lines(self.gpu),
            *storage_lines(self.memory, self.disk),
            *software_lines(self.software),
        ]


def examine(pair: Pair) -> DoctorReport:
    """Examine this machine; the first time, kernels are compiled and weights are timed."""
    cpu = cpu_facts()
    path = pair.target.folder or target_folder(pair)
    stored = has_stored(receipt(path))
    choice = choose_weights(path, "auto", "cpu", has_stored=stored).speed
    assert choice is not None  # "auto" on a CPU is measured
    return DoctorReport(
        cpu=cpu,
        kernels=kernel_facts(cpu),
        pair=pair.name,
        choice=choice,
        shapes_note=shapes_note(path),
        gpu=gpu_facts(),
        memory=memory_facts(),
        disk=disk_facts(),
        software=software_facts(),
    )


def shapes_note(path: Path) -> str | None:
    """Why the times are not those of the target at `path`; None if they are."""
    if read_shapes(path) is not None:
        return None
    reason = "its shapes are not known" if path.exists() else "not pulled"
    return f"{reason}: times of SmolLM2-135M's shapes"


def cpu_lines(cpu: CpuFacts) -> list[tuple[str, str]]:
    cache = f"last-level cache {cpu.cache_bytes // MIB} MiB"
    return [
        ("CPU", f"{cpu.model} ({cpu.architecture})"),
        ("", f"{count(cpu.cores, 'core')}, {count(cpu.threads, 'thread')}"),
        ("", f"{cache}; {' '.join(cpu.flags) or 'its features are not known'}"),
    ]


def kernel_lines(kernels: KernelFacts) -> list[tuple[str, str]]:
    lines = [("kernels", kernels.state)]
    if kernels.build:
        parts = [f"{key.replace('_', ' ')} {text(value)}" for key, value in kernels.build.items()]
        lines.append(("", ", ".join(parts)))
    for limitation in kernels.limitations:
        fix = f" To change it: {limitation.fix}." if limitation.fix else ""
        lines.append(("not better", f"{limitation.reason}: {limitation.loss}.{fix}"))
    if not kernels.limitations:
        lines.append(("", "the best that there are"))
    return lines


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def choice_lines(pair: str, choice: SpeedChoice, note: str | None) -> list[tuple[str, str]]:
    """The times of a pass, for each candidate and number of rows."""
    subject = f"{pair} ({note})" if note else pair
    lines = [
        ("dtype auto", f"{choice.chosen} for {subject}; milliseconds of a pass, measured here:")
    ]
    for name, times in choice.times.items():
        figures = ", ".join(f"{count(rows, 'row')} {ms:.2f}" for rows, ms in times.items())
        lines.append(("", f"{name}: {figures}"))
    return lines


def gpu_lines(gpu: GpuFacts) -> list[tuple[str, str]]:
    if gpu.name is None or gpu.memory_bytes is None or gpu.free_bytes is None:
        return [("GPU", f"none: {gpu.reason}")]
    sizes = f"{gpu.free_bytes / GB:.1f} of {gpu.memory_bytes / GB:.1f} GB free"
    versions = f"driver {gpu.driver}, CUDA {gpu.cuda}, triton {gpu.triton or 'not installed'}"
    lines = [("GPU", f"{gpu.name}, {sizes}, {versions}")]
    if gpu.triton is not None:
        lines.append(("", f"compiled kernels are kept in {gpu.triton_cache or '~/.triton'}"))
    return [*lines, ("", gpu.reason)] if gpu.reason else lines


def storage_lines(memory: MemoryFacts, disk: DiskFacts) -> list[tuple[str, str]]:
    free = "not known on this system"
    if memory.free_bytes is not None and memory.total_bytes is not None:
        free = f"{memory.free_bytes / GB:.1f} of {memory.total_bytes / GB:.1f} GB free"
    writable = "" if disk.writable else "; it cannot be written: set PEAGLE_HOME to another folder"
    return [
        ("memory", free),
        ("disk", f"{disk.free_bytes / GB:.1f} GB free for {disk.folder}{writable}"),
    ]


def software_lines(software: SoftwareFacts) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {v or 'not installed'}" for name, v in software.versions.items())
    lines = [("versions", versions)]
    for extra, packages in software.extras.items():
        present = ", ".join(f"{name} {v}" for name, v in packages.items() if v)
        missing = [name for name, v in packages.items() if v is None]
        note = f"; missing: {', '.join(missing)} (pip install 'peagle[{extra}]')" if missing else ""
        lines.append(("", f"{extra}: {present or 'nothing installed'}{note}"))
    policy = software.environment.get("OMP_WAIT_POLICY", "not set")
    lines.append(("OpenMP", f"wait policy (OMP_WAIT_POLICY): {policy}"))
    others = {k: v for k, v in software.environment.items() if k != "OMP_WAIT_POLICY"}
    if others:
        lines.append(("environment", ", ".join(f"{k}={v}" for k, v in others.items())))
    return lines
