"""The C library is compiled once, cached and rebuilt if broken; PyTorch is the fallback."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from peagle.kernels.cpu import library
from peagle.kernels.cpu.compiler import compiler_names, installed
from peagle.kernels.cpu.level import NATIVE, CpuLevel, machine_levels, supported_levels
from tests.support.engine.engines import ask, engine_of, pair_of
from tests.support.kernels.cpu_features import LEVELS
from tests.support.models.tiny_models import make_target

COMPILER = next((path for name in ("gcc", "cc", "clang") if (path := shutil.which(name))), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def quick_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["-O0" if flag == "-O3" else flag for flag in library.COMPILER_FLAGS]
    monkeypatch.setattr(library, "COMPILER_FLAGS", flags)


@pytest.fixture(scope="module")
def copying_compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A fake compiler that copies the built library: most tests do not depend on what is built."""
    assert COMPILER is not None
    library.load_or_build(COMPILER, NATIVE)
    built = library.library_path(COMPILER, NATIVE)
    script = f'for last; do :; done\ncp {built} "$last"'  # The last argument is the output.
    return write_compiler(tmp_path_factory.mktemp("compiler") / "copying-cc", script)


@pytest.mark.parametrize(
    "compiler",
    [  # test_gcc_before_12_builds_the_library covers the first compiler as well.
        pytest.param(compiler, marks=pytest.mark.slow if compiler == COMPILER else [])
        for compiler in installed(compiler_names())
    ],
)
def test_every_installed_compiler_builds_the_library_once(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_one_build(compiler, tmp_path, monkeypatch)


def check_one_build(compiler: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(home))
    assert library.load_or_build(compiler, NATIVE).functions
    files = {file.suffix for file in (home / "kernels").iterdir()}
    assert files - {".lock"} == {".sha256", ".so"}, "temporary files are left"

    def never(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(library, "build", never)
    assert library.load_or_build(compiler, NATIVE).functions


@needs_compiler
def test_one_of_several_processes_builds_the_library(
    copying_compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads simulate the processes: each of them opens the lock file."""
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    built: list[Path] = []
    waited: set[int] = set()
    all_loaded = threading.Barrier(3)
    load_intact, build = library.load_intact, library.build

    def load_together(path: Path) -> library.Library | None:
        loaded = load_intact(path)
        if threading.get_ident() not in waited:
            waited.add(threading.get_ident())
            all_loaded.wait(60)
        return loaded

    def count(compiler: str, level: CpuLevel, path: Path) -> None:
        built.append(path)
        build(compiler, level, path)

    monkeypatch.setattr(library, "load_intact", load_together)
    monkeypatch.setattr(library, "build", count)
    with ThreadPoolExecutor(3) as executor:
        loaded = executor.map(lambda _: library.load_or_build(copying_compiler, NATIVE), range(3))
    assert all(one.functions for one in loaded) and len(built) == 1


@needs_compiler
@pytest.mark.parametrize(
    ("content", "known"),
    [(b"", True), (b"not a library", False), (b"\x7fELF\x02\x01\x01" + b"\0" * 57, True)],
)
def test_a_broken_file_is_built_again(
    content: bytes,
    known: bool,
    copying_compiler: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file is rebuilt whether or not its digest matches the recorded one."""
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    file = library.library_path(copying_compiler, NATIVE)
    file.parent.mkdir()
    file.write_bytes(content)
    file.with_suffix(".sha256").write_text(library.file_digest(file) or "" if known else "another")
    assert library.load_or_build(copying_compiler, NATIVE).functions
    assert len(file.read_bytes()) > 1000


@needs_compiler
def test_the_cache_key_depends_on_level_cpu_and_flags() -> None:
    assert COMPILER is not None
    keys = [
        library.cache_key(COMPILER, NATIVE),
        *(library.cache_key(COMPILER, level) for level in supported_levels()[1:]),
        library.cache_key(COMPILER, NATIVE, cpu="another machine"),
        library.cache_key(COMPILER, NATIVE, flags=("-O1",)),
    ]
    assert len(set(keys)) == len(keys) >= 4


def test_a_missing_compiler_is_reported() -> None:
    result = library.load_library(["no-such-compiler"])
    assert result[:2] == (None, "pytorch: no C compiler found (gcc 9 or newer, or clang)")


def write_compiler(path: Path, script: str) -> str:
    path.write_text(
        f"#!/bin/sh\n[ $1 = --version ] && echo cc {path.name} 1.0 && exit 0\n{script}\n"
    )
    path.chmod(0o755)
    return str(path)


GCC_11_OUTPUT = """kernels.c: In function 'transpose_tile':
kernels.c:25:27: warning: implicit declaration of function '__builtin_shufflevector'
kernels.c:25:27: error: incompatible types when assigning to type 'vec' from type 'int'
   25 |             tile[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19,
      |                           ^~~~~~~~~~~~~~~~~~~~~~~"""


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("out of cheese", "out of cheese"),
        (
            GCC_11_OUTPUT,
            "kernels.c:25:27: error: incompatible types when assigning to type 'vec' from type"
            " 'int'",
        ),
        (
            "/usr/bin/ld: cannot find -lm\ncollect2: error: ld returned 1 exit status",
            "/usr/bin/ld: cannot find -lm",
        ),
        ("", "no reason given"),
    ],
)
def test_the_first_error_is_reported(
    output: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    script = f"cat >&2 <<'END'\n{output}\nEND\nexit 1"
    bad = write_compiler(tmp_path / "bad-cc", script)
    assert library.load_library([bad])[:2] == (None, f"pytorch: {bad} failed: {reason}")


@needs_compiler
def test_the_next_compiler_is_tried(
    copying_compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    bad = [write_compiler(tmp_path / name, "exit 1") for name in ("first-cc", "second-cc")]
    monkeypatch.setenv("CC", bad[0])
    assert compiler_names()[:2] == [bad[0], "gcc"] and "clang-14" in compiler_names()
    result = library.load_library([*bad, copying_compiler])
    assert result.state.startswith("c, ") and result.library is not None
    assert result.build is not None and result.build.compiler == copying_compiler
    assert library.load_library(bad).state.count(" failed: no reason given") == 2


@needs_compiler
def test_a_compiler_with_two_names_is_tried_once(tmp_path: Path) -> None:
    assert COMPILER is not None
    link = tmp_path / "another-name"
    link.symlink_to(COMPILER)
    assert list(installed([COMPILER, str(link), "no-such-compiler"])) == [COMPILER]


@pytest.mark.slow
@needs_compiler
def test_gcc_before_12_builds_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gcc of this machine runs without the built-in that gcc 12 added."""
    assert COMPILER is not None
    if "Free Software Foundation" not in library.compiler_version(COMPILER):
        pytest.skip("gcc is not installed")
    missing = "-D'__builtin_shufflevector(...)=missing_before_gcc_12'"
    old = write_compiler(tmp_path / "old-gcc", f'exec {COMPILER} {missing} "$@"')
    check_one_build(old, tmp_path / "home", monkeypatch)
    assert library.load_library([old]).state.startswith("c, ")


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
def test_the_build_is_reported(level: CpuLevel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # Use the normal flags, whose libraries other tests have built.
    monkeypatch.setenv("PEAGLE_CPU_LEVEL", level.name)
    assert COMPILER is not None
    built = library.load_library([COMPILER]).build
    assert built is not None and built.level == level.name and built.compiler == COMPILER
    assert built.compiler_version and "\n" not in built.compiler_version
    expected = {"avx512": ("avx512", 512), "avx2": ("avx2", 256)}
    if level.name in expected:
        assert (built.instruction_set, built.vector_bits) == expected[level.name]
        assert built.features == ("f16c",) and built.name == level.name


def test_an_unknown_level_is_reported_with_supported_levels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PEAGLE_CPU_LEVEL", "avx1024")
    result = library.load_library(compiler_names())
    assert result.library is None and result.state.startswith(
        "pytorch: PEAGLE_CPU_LEVEL=avx1024 is not supported by this CPU, only native, "
    )


@pytest.mark.parametrize(
    ("machine", "features", "names"),
    [
        ("x86_64", "sse2 avx avx2 fma f16c avx512f", ["native", "avx2", "baseline"]),
        ("AMD64", "sse2", ["native", "baseline"]),
        (
            "x86_64",
            "avx2 fma f16c avx512f avx512bw avx512dq avx512vl",
            ["native", "avx512", "avx2", "baseline"],
        ),
        ("aarch64", "asimd asimddp", ["native", "baseline"]),
        ("riscv64", "", ["native", "baseline"]),
    ],
)
def test_levels_of_a_machine(machine: str, features: str, names: list[str]) -> None:
    assert [level.name for level in machine_levels(machine, set(features.split()))] == names


@needs_compiler
def test_answers_are_equal_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, rounding differences do not change the tokens."""

    def answer() -> tuple[str, list[int]]:
        engine = engine_of(pair_of(make_target()), "none")
        tokens, _ = ask(engine, [7, 8, 9] * 7, max_tokens=20, ignore_eos=True)
        return engine.status()["kernels"], tokens

    state, tokens = answer()
    assert state.startswith("c, ") and len(tokens) == 20
    monkeypatch.setenv("PEAGLE_NATIVE", "0")
    without = library.load_library(compiler_names())
    monkeypatch.setattr(library, "_load_once", lambda: without)
    assert answer() == ("pytorch: PEAGLE_NATIVE=0", tokens)
