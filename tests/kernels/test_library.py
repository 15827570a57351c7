"""The C library: compiled once, cached, rebuilt if broken; PyTorch runs without a compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from peagle.kernels.cpu import library
from tests.support.engines import engine_of, pair_of
from tests.support.tiny_models import make_target

COMPILER = next((path for name in ("gcc", "cc", "clang") if (path := shutil.which(name))), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
ANSWER = """
from tests.support.tiny_models import make_target
from tests.support.engines import engine_of, pair_of
engine = engine_of(pair_of(make_target()), "none")
stream = engine.add([7, 8, 9] * 7, max_tokens=20, ignore_eos=True)
engine.drain()
print(engine.status()["kernels"])
print([token for piece in stream for token in (piece.step.tokens if piece.step else ())])
"""


def answer(**env: str) -> list[str]:
    """[the kernels in use, the tokens], from a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", ANSWER], env=os.environ | env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_compiler
def test_compiled_once_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    assert COMPILER is not None
    library.load_or_build(COMPILER)
    files = sorted(file.name for file in (tmp_path / "kernels").iterdir())
    assert [Path(name).suffix for name in files] == [".sha256", ".so"], (
        "no temporary files are left"
    )

    def never(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(library, "build", never)
    library.load_or_build(COMPILER)


@needs_compiler
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("content", [b"", b"not a library", b"\x7fELF\x02\x01\x01" + b"\0" * 57])
def test_a_broken_file_is_built_again(
    content: bytes, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not its digest is the recorded one."""
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    assert COMPILER is not None
    file = library.library_path(COMPILER, library.openmp_runtime())
    file.parent.mkdir()
    file.write_bytes(content)
    file.with_suffix(".sha256").write_text(library.file_digest(file) or "" if known else "another")
    assert library.load_or_build(COMPILER).functions
    assert len(file.read_bytes()) > 1000


@needs_compiler
def test_the_cache_key_depends_on_everything() -> None:
    assert COMPILER is not None
    keys = [
        library.cache_key(COMPILER, None),
        library.cache_key(COMPILER, "libgomp.so.1"),
        library.cache_key(COMPILER, None, cpu="another machine"),
        library.cache_key(COMPILER, None, flags=("-O1",)),
    ]
    assert len(set(keys)) == 4


def test_no_compiler() -> None:
    result = library.load_library(["no-such-compiler"])
    assert result == (None, "pytorch: no C compiler found (gcc, cc or clang)")


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    bad = tmp_path / "bad-cc"
    bad.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho out of cheese >&2\nexit 1\n")
    bad.chmod(0o755)
    result = library.load_library([str(bad)])
    assert result == (None, f"pytorch: {bad} failed: out of cheese")


@needs_compiler
def test_an_unusable_runtime_costs_only_the_threads(tmp_path: Path) -> None:
    assert COMPILER is not None
    path = tmp_path / "library.so"
    library.build(COMPILER, str(tmp_path / "no-such-runtime.so"), path)
    assert library.Library(path).functions


@needs_compiler
def test_the_same_answer_without_it() -> None:
    """In float32, where rounding decides nothing."""
    engine = engine_of(pair_of(make_target()), "none")
    assert engine.status()["kernels"] == "c"
    with_it, without = answer(), answer(PEAGLE_NATIVE="0")
    assert (with_it[0], without[0]) == ("c", "pytorch: PEAGLE_NATIVE=0")
    assert with_it[1] == without[1] and len(with_it[1]) > 20
