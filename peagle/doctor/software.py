"""Versions of packages, settings of the environment, free memory and disk."""

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import peagle
from peagle.paths import cache_home, is_writable

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "gguf", "triton")
# By the extra of peagle that installs them.
OPTIONAL_PACKAGES = {
    "serve": ("fastapi", "uvicorn", "httptools", "uvloop", "prometheus_client", "llguidance"),
    "train": ("matplotlib", "tensorboard"),
    "deploy": ("boto3",),
}
VARIABLES = (
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"),
    *("PEAGLE_NATIVE", "PEAGLE_CPU_LEVEL", "PEAGLE_HOME", "PEAGLE_SOURCES", "CC"),
    "PYTHONPYCACHEPREFIX",
)
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USE = Path("/sys/fs/cgroup/memory.current")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    total_bytes: int | None  # None: not known on this system
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class DiskFacts:
    folder: str  # PEAGLE_HOME
    free_bytes: int
    writable: bool


@dataclass(frozen=True, slots=True)
class SoftwareFacts:
    versions: dict[str, str | None]  # None: not installed
    extras: dict[str, dict[str, str | None]]  # extra -> package -> version
    environment: dict[str, str]  # those of VARIABLES that are set

    @property
    def missing_extras(self) -> list[str]:
        return [name for name, packages in self.extras.items() if None in packages.values()]


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def software_facts(environment: Mapping[str, str] = os.environ) -> SoftwareFacts:
    own: dict[str, str | None] = {"peagle": peagle.__version__, "python": platform.python_version()}
    return SoftwareFacts(
        own | {name: installed_version(name) for name in PACKAGES},
        {
            extra: {name: installed_version(name) for name in packages}
            for extra, packages in OPTIONAL_PACKAGES.items()
        },
        {name: environment[name] for name in VARIABLES if name in environment},
    )


def memory_facts(
    meminfo: Path = MEMINFO, limit: Path = CGROUP_LIMIT, use: Path = CGROUP_USE
) -> MemoryFacts:
    """The memory of the machine, or of the container if that is less."""
    try:
        lines = [line.split() for line in meminfo.read_text().splitlines()]
        sizes = {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) > 1}
        total, free = sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, ValueError, KeyError):
        return MemoryFacts(None, None)
    try:
        container = int(limit.read_text())  # "max" without a limit
        if container < total:
            total = container
            free = min(free, max(0, container - int(use.read_text())))
    except (OSError, ValueError):
        pass  # This process is in no container with a limit.
    return MemoryFacts(total, free)


def disk_facts(folder: Path | None = None) -> DiskFacts:
    """Of the disk on which `folder` lies or will lie; None: PEAGLE_HOME."""
    folder = folder or cache_home()
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return DiskFacts(str(folder), shutil.disk_usage(existing).free, is_writable(folder))
