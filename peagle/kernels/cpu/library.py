"""The C kernels of a CPU (c/*.c) as a library: compiled at first use by the machine's own compiler, and kept.

It lies in the cache folder under a hash of the sources, the compiler, its flags and the CPU's. Without a compiler, or
with PEAGLE_NATIVE=0, there is none and PyTorch does the work: `state()` says which, and why. Threads are those of the
OpenMP runtime that PyTorch has loaded; a second one would fight it for the cores.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from peagle.paths import cache_home

SOURCES = Path(__file__).parent / "c"
FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-std=gnu11")
DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32"}

P, L, F, I = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int  # noqa: E741
ARGUMENTS: dict[str, list[Any]] = {
    "add_norm": [P] * 5 + [L] * 6 + [F, I],
    "rope_store": [P] * 8 + [L] * 7 + [F, I],
    "swiglu": [P] * 2 + [L] * 3 + [I],
    "argmax": [P] * 2 + [L] * 3 + [I],
    "attend": [P] * 10 + [L] * 11 + [F, I],
}


class Library:
    """The functions, by name and dtype."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        self.functions: dict[tuple[str, torch.dtype], Any] = {}
        for name, arguments in ARGUMENTS.items():
            for dtype, suffix in DTYPES.items():
                function = getattr(loaded, f"{name}_{suffix}")
                function.argtypes, function.restype = arguments, None
                self.functions[name, dtype] = function
        self.panel = loaded.panel_width()  # outputs that a packed weight holds together
        self.multiplies = self.panel > 0  # this CPU has dot products of bf16 and int8
        if self.multiplies:
            self.pack, self.multiply, self.layer = loaded.pack, loaded.multiply, loaded.layer
            self.pack.argtypes, self.pack.restype = [P, P, L, L, L, L], None
            self.multiply.argtypes, self.multiply.restype = [P] * 3 + [L] * 2 + [I], None
            self.layer.argtypes, self.layer.restype = [P] * 4 + [L] + [P] * 5, None


@cache
def library() -> Library | None:
    return _find()[0]


def kernel_state() -> str:
    """`c`, or why it is not."""
    return _find()[1]


@cache
def _find() -> tuple[Library | None, str]:
    if os.environ.get("PEAGLE_NATIVE") == "0":
        return None, "pytorch: PEAGLE_NATIVE=0"
    compiler = next((path for name in compilers() if (path := shutil.which(name))), None)
    if compiler is None:
        return None, "pytorch: no C compiler found (gcc, cc or clang)"
    try:
        return load(compiler), "c"
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return (
            None,
            f"pytorch: {compiler} failed: {said.strip().splitlines()[-1] if said.strip() else 'no reason given'}",
        )


def compilers() -> tuple[str, ...]:
    chosen = os.environ.get("CC")
    return (*((chosen,) if chosen else ()), "gcc", "cc", "clang")


def load(compiler: str) -> Library:
    """From the cache folder, if what lies there is what was written; else compiled."""
    runtime = openmp()
    path = cache_home() / "kernels" / f"cpu-{key_of(compiler, runtime)}.so"
    if digest(path) == written(path):
        try:
            return Library(path)
        except OSError:  # of another machine, perhaps
            pass
    build(compiler, runtime, path)
    return Library(path)


def key_of(compiler: str, runtime: str | None) -> str:
    """Of everything that the library depends on."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    parts = [
        *(f"{file.name}\n{file.read_text()}" for file in sources()),
        version,
        *FLAGS,
        cpu_flags(),
        runtime or "",
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def sources() -> list[Path]:
    return sorted(file for file in SOURCES.iterdir() if file.suffix in (".c", ".h", ".inc"))


def cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {found}"


def openmp() -> str | None:
    """The runtime that PyTorch has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    loaded = [line.split(maxsplit=5)[-1] for line in maps if "omp" in line.rsplit("/", 1)[-1]]
    names = ("libgomp", "libiomp", "libomp")
    return next(
        (path for name in names for path in loaded if Path(path).name.startswith(name)), None
    )


def build(compiler: str, runtime: str | None, path: Path) -> None:
    """Written beside and renamed; one thread where the compiler and PyTorch's runtime do not fit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=path.parent) as folder:
        made = Path(folder) / "made.so"
        files = [str(file) for file in sources() if file.suffix == ".c"]
        try:
            if runtime is None:
                raise OSError("no OpenMP runtime is loaded")
            compile_with(compiler, made, folder, files, runtime)
        except (OSError, subprocess.SubprocessError):
            run([compiler, *FLAGS, *files, "-lm", "-o", str(made)])
        sums = path.with_suffix(".sha256")
        partial = Path(folder) / "sum"
        partial.write_text(digest(made) or "")
        made.replace(path)
        partial.replace(sums)


def compile_with(compiler: str, made: Path, folder: str, files: list[str], runtime: str) -> None:
    """-fopenmp while compiling, not while linking: the compiler would link a runtime of its own."""
    objects = []
    flags = [flag for flag in FLAGS if flag != "-shared"]
    for file in files:
        objects.append(f"{folder}/{Path(file).stem}.o")
        run([compiler, *flags, "-fopenmp", "-c", file, "-o", objects[-1]])
    run([compiler, "-shared", *objects, runtime, "-lm", "-Wl,-z,defs", "-o", str(made)])


def run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)


def digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def written(path: Path) -> str:
    sums = path.with_suffix(".sha256")
    return sums.read_text() if sums.is_file() else "nothing"
