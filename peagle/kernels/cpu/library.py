"""The C kernels (c/*.c) as a shared library, compiled at first use by the machine's compiler.

The library is cached under a hash of its sources, the compiler, the flags and the CPU's features.
Compilers are tried in turn until one of them builds it: gcc 9 or newer, or clang. Without one, or
with PEAGLE_NATIVE=0, PyTorch computes instead; `kernel_state()` reports which of them runs, and
why. The threads are those of the OpenMP runtime that PyTorch has loaded: a second runtime would
compete with it for the cores. A library without that runtime (clang's code does not fit GNU's
OpenMP, for example) has one thread, and is used only if no other compiler builds one with threads.
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from peagle.kernels.cpu.compiler import (
    COMPILER_FLAGS,
    compiler_names,
    compiler_version,
    failure_reason,
    installed,
    run,
)
from peagle.paths import cache_home

SOURCE_FOLDER = Path(__file__).parent / "c"
DTYPE_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}

POINTER = ctypes.c_void_p
LONG = ctypes.c_long
FLOAT = ctypes.c_float
INT = ctypes.c_int
ARGUMENT_TYPES: dict[str, list[Any]] = {
    "add_norm": [POINTER] * 5 + [LONG] * 6 + [FLOAT, INT],
    "rope_store": [POINTER] * 8 + [LONG] * 7 + [FLOAT, INT],
    "swiglu": [POINTER] * 2 + [LONG] * 3 + [INT],
    "argmax": [POINTER] * 2 + [LONG] * 3 + [INT],
    "attend": [POINTER] * 10 + [LONG] * 11 + [FLOAT, INT],
}
PACK_TYPES = [POINTER] * 2 + [LONG] * 4
MULTIPLY_TYPES = [POINTER] * 3 + [LONG] * 2 + [INT]
LAYER_TYPES = [POINTER] * 4 + [LONG] + [POINTER] * 5


class Library:
    """The loaded C functions: `functions` by name and dtype, and those of packed matrices."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        self.functions: dict[tuple[str, torch.dtype], Any] = {}
        for name, types in ARGUMENT_TYPES.items():
            for dtype, suffix in DTYPE_SUFFIXES.items():
                self.functions[name, dtype] = declared(loaded, f"{name}_{suffix}", types)
        self.has_threads = bool(loaded.has_openmp())
        self.panel_width: int = loaded.panel_width()  # outputs in a panel of a packed matrix
        # Packed matrices need a CPU with dot products of bf16 and int8.
        self.has_packed_matrices = self.panel_width > 0
        if self.has_packed_matrices:
            self.pack = declared(loaded, "pack", PACK_TYPES)
            self.multiply = declared(loaded, "multiply", MULTIPLY_TYPES)
            self.layer = declared(loaded, "layer", LAYER_TYPES)


def declared(loaded: ctypes.CDLL, name: str, types: list[Any]) -> Any:
    """The C function of that name, which returns nothing."""
    function = getattr(loaded, name)
    function.argtypes = types
    function.restype = None
    return function


class LoadResult(NamedTuple):
    library: Library | None
    state: str  # `c`, `c, one thread: ` or `pytorch: ` and the reason


def library() -> Library | None:
    return _load_once().library


def kernel_state() -> str:
    """`c` if the C kernels run, else `pytorch: ` and the reason.

    `c, one thread: ` and the reason, if they run on one thread however many there are.
    """
    return _load_once().state


@cache
def _load_once() -> LoadResult:
    return load_library(compiler_names())


def load_library(compilers: Sequence[str]) -> LoadResult:
    """Load the library, compiled by the first of these compilers that builds it with threads.

    If none does, the first library without threads is used.
    """
    if os.environ.get("PEAGLE_NATIVE") == "0":
        return LoadResult(None, "pytorch: PEAGLE_NATIVE=0")
    one_thread: LoadResult | None = None
    failures: list[str] = []
    for compiler in installed(compilers):
        try:
            loaded = load_or_build(compiler)
        except (OSError, subprocess.SubprocessError, AttributeError) as error:
            failures.append(f"{compiler} failed: {failure_reason(error)}")
            continue
        if loaded.has_threads:
            return LoadResult(loaded, "c")
        one_thread = one_thread or LoadResult(loaded, one_thread_state(compiler))
    if one_thread is not None:
        return one_thread
    reason = "; ".join(failures) or "no C compiler found (gcc 9 or newer, or clang)"
    return LoadResult(None, f"pytorch: {reason}")


def one_thread_state(compiler: str) -> str:
    runtime = openmp_runtime()
    if runtime is None:
        return "c, one thread: PyTorch has loaded no OpenMP runtime"
    return (
        f"c, one thread: the code of {compiler} does not fit PyTorch's OpenMP runtime"
        f" ({Path(runtime).name}): install gcc"
    )


def load_or_build(compiler: str) -> Library:
    """Load the library from the cache folder if its file is intact, else compile it first."""
    runtime = openmp_runtime()
    path = library_path(compiler, runtime)
    if file_digest(path) == recorded_digest(path):
        try:
            return Library(path)
        except OSError:  # The file was built on another machine, for example.
            pass
    build(compiler, runtime, path)
    return Library(path)


def library_path(compiler: str, runtime: str | None) -> Path:
    return cache_home() / "kernels" / f"cpu-{cache_key(compiler, runtime)}.so"


def cache_key(
    compiler: str,
    runtime: str | None,
    flags: Sequence[str] = COMPILER_FLAGS,
    cpu: str | None = None,
) -> str:
    """A hash of everything that the compiled library depends on."""
    parts = [
        *(f"{file.name}\n{file.read_text()}" for file in source_files()),
        compiler_version(compiler),
        *flags,
        cpu_features() if cpu is None else cpu,
        runtime or "",
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def source_files() -> list[Path]:
    return sorted(file for file in SOURCE_FOLDER.iterdir() if file.suffix in (".c", ".h", ".inc"))


def cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {features}"


def openmp_runtime() -> str | None:
    """The path of the OpenMP runtime that PyTorch has loaded."""
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
    """Compile the library to `path`, through a temporary folder beside it.

    If the compiler and PyTorch's OpenMP runtime do not fit together, the library has one thread.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=path.parent) as folder:
        built = Path(folder) / "library.so"
        files = [str(file) for file in source_files() if file.suffix == ".c"]
        try:
            if runtime is None:
                raise OSError("no OpenMP runtime is loaded")
            compile_with_openmp(compiler, runtime, files, built)
        except (OSError, subprocess.SubprocessError):
            run([compiler, *COMPILER_FLAGS, *files, "-lm", "-o", str(built)])
        digest = Path(folder) / "digest"
        digest.write_text(file_digest(built) or "")
        built.replace(path)
        digest.replace(digest_path(path))


def compile_with_openmp(compiler: str, runtime: str, files: list[str], built: Path) -> None:
    """Compile with -fopenmp but link PyTorch's runtime: -fopenmp would link the compiler's own."""
    objects = []
    flags = [flag for flag in COMPILER_FLAGS if flag != "-shared"]
    for file in files:
        objects.append(str(built.parent / f"{Path(file).stem}.o"))
        run([compiler, *flags, "-fopenmp", "-c", file, "-o", objects[-1]])
    run([compiler, "-shared", *objects, runtime, "-lm", "-Wl,-z,defs", "-o", str(built)])


def file_digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def digest_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def recorded_digest(path: Path) -> str:
    """The digest that was written when the library was built, or "missing"."""
    file = digest_path(path)
    return file.read_text() if file.is_file() else "missing"
