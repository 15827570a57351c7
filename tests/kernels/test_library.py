"""The C library: compiled once, found again, rebuilt if it is broken, and done without where there is no compiler."""

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
    """[what does the work, the tokens], in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", ANSWER], env=os.environ | env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_compiler
def test_compiled_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    assert COMPILER is not None
    library.load(COMPILER)
    files = sorted(file.name for file in (tmp_path / "kernels").iterdir())
    assert [Path(name).suffix for name in files] == [".sha256", ".so"], (
        "nothing is left of the building"
    )

    def never(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(library, "build", never)
    library.load(COMPILER)


@needs_compiler
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("content", [b"", b"not a library", b"\x7fELF\x02\x01\x01" + b"\0" * 57])
def test_a_broken_file_is_built_again(
    content: bytes, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not its sum is the one that was written."""
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    assert COMPILER is not None
    file = tmp_path / "kernels" / f"cpu-{library.key_of(COMPILER, library.openmp())}.so"
    file.parent.mkdir()
    file.write_bytes(content)
    file.with_suffix(".sha256").write_text(library.digest(file) or "" if known else "another")
    assert library.load(COMPILER).functions
    assert len(file.read_bytes()) > 1000


@needs_compiler
def test_the_key_is_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert COMPILER is not None
    keys = [library.key_of(COMPILER, None), library.key_of(COMPILER, "libgomp.so.1")]
    monkeypatch.setattr(library, "cpu_flags", lambda: "another machine")
    keys.append(library.key_of(COMPILER, None))
    monkeypatch.setattr(library, "FLAGS", ("-O1",))
    keys.append(library.key_of(COMPILER, None))
    assert len(set(keys)) == 4


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "compilers", lambda: ("no-such-compiler",))
    assert library._find.__wrapped__() == (None, "pytorch: no C compiler found (gcc, cc or clang)")


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    bad = tmp_path / "bad-cc"
    bad.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho out of cheese >&2\nexit 1\n")
    bad.chmod(0o755)
    monkeypatch.setattr(library, "compilers", lambda: (str(bad),))
    assert library._find.__wrapped__() == (None, f"pytorch: {bad} failed: out of cheese")


@needs_compiler
def test_a_runtime_that_does_not_fit_costs_the_threads_only(tmp_path: Path) -> None:
    assert COMPILER is not None
    path = tmp_path / "made.so"
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
