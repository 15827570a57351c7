"""The C kernels (c/*.c) as a shared library, compiled at first use by the machine's compiler.

The library is cached under a hash of its sources, the compiler, the flags and the CPU's features.
Compilers are tried in turn until one of them builds it: gcc 9 or newer, or clang. Without one, or
with PEAGLE_NATIVE=0, PyTorch computes instead; `kernel_state()` reports which of them runs, and
why, and `kernel_build()` what was compiled.
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock

from peagle.kernels.cpu.compiler import (
    COMPILER_FLAGS,
    compiler_names,
    compiler_version,
    failure_reason,
    installed,
    run,
)
from peagle.kernels.cpu.level import CpuLevel, chosen_level, cpu_features
from peagle.kernels.stored_matrix import BLOCK_FORMATS
from peagle.paths import cache_home

SOURCE_FOLDER = Path(__file__).parent / "c"
FORMAT_FILE = SOURCE_FOLDER / "format.c"
# Of packed matrices, in the order of `enum format` in c/matrix.h.
FORMATS = ("BF16", "INT8", *BLOCK_FORMATS, "MXFP4")
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
    "attend": [POINTER] * 11 + [LONG] * 11 + [FLOAT, INT],
    "multiply": [POINTER] * 3 + [LONG] * 2 + [INT],
    "experts": [POINTER, POINTER, LONG] + [POINTER] * 3 + [LONG] * 2 + [INT],
    "moe": [POINTER, POINTER, LONG, POINTER, LONG, INT],
    "layer": [POINTER] * 4 + [LONG] + [POINTER] * 5,
    "layers": [POINTER, LONG] + [POINTER] * 8,
}
PACK_TYPES = [LONG] + [POINTER] * 2 + [LONG] * 3 + [INT]


class Library:
    """The loaded C functions: `functions` by name and dtype, and those of packed matrices."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        loaded.instruction_set.restype = loaded.cpu_features.restype = ctypes.c_char_p
        self.instruction_set: str = loaded.instruction_set().decode()
        self.vector_bits: int = loaded.vector_bits()
        self.features: tuple[str, ...] = tuple(loaded.cpu_features().decode().split())
        self.functions: dict[tuple[str, torch.dtype], Any] = {}
        for name, types in ARGUMENT_TYPES.items():
            for dtype, suffix in DTYPE_SUFFIXES.items():
                self.functions[name, dtype] = declared(loaded, f"{name}_{suffix}", types)
        self.pack = declared(loaded, "pack", PACK_TYPES)
        self.packed_size = declared(loaded, "packed_size", [LONG] * 3)
        self.packed_size.restype = LONG


def declared(loaded: ctypes.CDLL, name: str, types: list[Any]) -> Any:
    """The C function of that name, which returns nothing."""
    function = getattr(loaded, name)
    function.argtypes = types
    function.restype = None
    return function


@dataclass(frozen=True)
class KernelBuild:
    """What the compiled kernels use."""

    level: str  # of PEAGLE_CPU_LEVEL: native, avx512, avx2 or baseline
    instruction_set: str  # avx512, avx2, sse2 or neon
    vector_bits: int
    features: tuple[str, ...]  # in use: bf16, dotprod, vnni, f16c
    compiler: str  # its path
    compiler_version: str

    @property
    def name(self) -> str:
        """The instruction set and its best dot product: `avx512-bf16`, `avx2`, `neon-dotprod`."""
        dots = [name for name in self.features if name != "f16c"]
        return "-".join([self.instruction_set, *dots[:1]])


class LoadResult(NamedTuple):
    library: Library | None
    state: str  # `c, avx2`, for example, or `pytorch: ` and the reason
    build: KernelBuild | None = None


def library() -> Library | None:
    return _load_once().library


def kernel_state() -> str:
    """`c, ` and the instruction set if the C kernels run, else `pytorch: ` and the reason."""
    return _load_once().state


def kernel_build() -> KernelBuild | None:
    return _load_once().build


@cache
def _load_once() -> LoadResult:
    return load_library(compiler_names())


def load_library(compilers: Sequence[str]) -> LoadResult:
    """Load the library, compiled by the first of these compilers that builds it."""
    if os.environ.get("PEAGLE_NATIVE") == "0":
        return LoadResult(None, "pytorch: PEAGLE_NATIVE=0")
    try:
        level = chosen_level()
    except ValueError as error:
        return LoadResult(None, f"pytorch: {error}")
    failures: list[str] = []
    for compiler in installed(compilers):
        try:
            loaded = load_or_build(compiler, level)
            built = describe_build(loaded, compiler, level)
        except (OSError, subprocess.SubprocessError, AttributeError) as error:
            failures.append(f"{compiler} failed: {failure_reason(error)}")
            continue
        return LoadResult(loaded, f"c, {built.name}", built)
    reason = "; ".join(failures) or "no C compiler found (gcc 9 or newer, or clang)"
    return LoadResult(None, f"pytorch: {reason}")


def describe_build(loaded: Library, compiler: str, level: CpuLevel) -> KernelBuild:
    return KernelBuild(
        level.name,
        loaded.instruction_set,
        loaded.vector_bits,
        loaded.features,
        compiler,
        compiler_version(compiler).partition("\n")[0],
    )


def load_or_build(compiler: str, level: CpuLevel) -> Library:
    """Load the library from the cache folder if its file is intact, else compile it first.

    Of several processes that need it at the same time, one compiles it.
    """
    path = library_path(compiler, level)
    if loaded := load_intact(path):
        return loaded
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        if loaded := load_intact(path):
            return loaded
        build(compiler, level, path)
    return Library(path)


def load_intact(path: Path) -> Library | None:
    """The library, if its file is the one that was built here."""
    if file_digest(path) != recorded_digest(path):
        return None
    try:
        return Library(path)
    except OSError:  # The file was built on another machine, for example.
        return None


def library_path(compiler: str, level: CpuLevel) -> Path:
    return cache_home() / "kernels" / f"cpu-{cache_key(compiler, level)}.so"


def cache_key(
    compiler: str,
    level: CpuLevel,
    flags: Sequence[str] = COMPILER_FLAGS,
    cpu: str | None = None,
) -> str:
    """A hash of everything that the compiled library depends on."""
    parts = [
        *(f"{file.name}\n{file.read_text()}" for file in source_files()),
        compiler_version(compiler),
        *flags,
        *level.flags,
        f"{platform.machine()} {platform.processor()} {cpu_features()}" if cpu is None else cpu,
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def source_files() -> list[Path]:
    return sorted(file for file in SOURCE_FOLDER.iterdir() if file.suffix in (".c", ".h", ".inc"))


def build(compiler: str, level: CpuLevel, path: Path) -> None:
    """Compile the library to `path`, through a temporary folder beside it."""
    with tempfile.TemporaryDirectory(prefix=".building-", dir=path.parent) as folder:
        built = Path(folder) / "library.so"
        command = [compiler, *COMPILER_FLAGS, *level.flags]
        with ThreadPoolExecutor(os.cpu_count()) as executor:
            objects = list(
                executor.map(
                    lambda unit: compile_unit(command, unit, Path(folder)), translation_units()
                )
            )
        run([*command, "-shared", *objects, "-lm", "-o", str(built)])
        digest = Path(folder) / "digest"
        digest.write_text(file_digest(built) or "")
        built.replace(path)
        digest.replace(digest_path(path))


def translation_units() -> list[list[str]]:
    """What is compiled on its own: a file, with a definition if it is compiled once per format."""
    files = [file for file in source_files() if file.suffix == ".c"]
    return [
        *([str(file)] for file in files if file != FORMAT_FILE),
        *([str(FORMAT_FILE), f"-DFORMAT={name}"] for name in FORMATS),
    ]


def compile_unit(command: list[str], unit: list[str], folder: Path) -> str:
    """Compile a unit to an object file in `folder`; returns its path."""
    name = Path(unit[0]).stem + "".join(unit[1:]).replace("=", "-")
    path = str(folder / f"{name}.o")
    run([*command, "-c", *unit, "-o", path])
    return path


def file_digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def digest_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def recorded_digest(path: Path) -> str:
    """The digest that was written when the library was built, or "missing"."""
    file = digest_path(path)
    return file.read_text() if file.is_file() else "missing"
