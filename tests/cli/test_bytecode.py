"""The bytecode cache under PEAGLE_HOME, for installed packages without bytecode."""

import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from peagle.cli import bytecode
from peagle.cli.bytecode import DONT_WRITE_VARIABLE, PREFIX_VARIABLE, keep_bytecode

PACKAGE = "package_without_bytecode"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The `__init__.py` of a package without bytecode, in a process that writes none."""
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    return write_package(tmp_path / "site-packages", PACKAGE, "value = 1\n")


def write_package(folder: Path, name: str, text: str) -> Path:
    source = folder / name / "__init__.py"
    source.parent.mkdir(parents=True)
    source.write_text(text)
    return source


def run_python(program: str, **variables: str) -> list[str]:
    """Run a program where Python writes no bytecode, and return the words of its output."""
    inherited = {name: text for name, text in os.environ.items() if name != PREFIX_VARIABLE}
    environment = {**inherited, DONT_WRITE_VARIABLE: "1", **variables}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert not done.stderr
    return done.stdout.split()


def assert_nothing_changes(environment: dict[str, str]) -> None:
    before = (dict(environment), sys.pycache_prefix, sys.dont_write_bytecode)
    keep_bytecode(environment, PACKAGE)
    assert (environment, sys.pycache_prefix, sys.dont_write_bytecode) == before


def test_bytecode_is_kept_under_peagle_home(source: Path, tmp_path: Path) -> None:
    environment = {DONT_WRITE_VARIABLE: "1"}
    keep_bytecode(environment, PACKAGE)
    folder = str(tmp_path / "home" / "bytecode")
    assert environment == {PREFIX_VARIABLE: folder}
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == (folder, False)


def test_bytecode_of_read_only_packages_is_kept_under_peagle_home(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(bytecode, "access", lambda path, mode: path != source.parent)
    environment: dict[str, str] = {}
    keep_bytecode(environment, PACKAGE)
    assert PREFIX_VARIABLE in environment


def test_packages_with_bytecode_need_no_cache(source: Path) -> None:
    py_compile.compile(str(source), doraise=True)
    assert_nothing_changes({DONT_WRITE_VARIABLE: "1"})


def test_writable_packages_need_no_cache(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert_nothing_changes({})


def test_sources_with_fixed_times_need_no_cache(source: Path) -> None:
    os.utime(source, (315532800, 315532800))  # 1980, the first year of a zip file
    assert_nothing_changes({DONT_WRITE_VARIABLE: "1"})


def test_a_package_that_is_not_installed_needs_no_cache(source: Path) -> None:
    source.unlink()
    source.parent.rmdir()
    assert_nothing_changes({DONT_WRITE_VARIABLE: "1"})


@pytest.mark.parametrize("prefix", ["/elsewhere", ""])
def test_variables_of_the_user_are_kept(source: Path, prefix: str) -> None:
    assert_nothing_changes({PREFIX_VARIABLE: prefix, DONT_WRITE_VARIABLE: "1"})


def test_an_option_of_the_interpreter_is_kept(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", "/elsewhere")  # -X pycache_prefix
    assert_nothing_changes({DONT_WRITE_VARIABLE: "1"})


def test_an_unwritable_peagle_home_is_not_used(source: Path, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    assert_nothing_changes({DONT_WRITE_VARIABLE: "1"})


def test_a_missing_home_directory_is_no_error(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user without an entry in /etc/passwd has no home directory if HOME is not set."""

    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(bytecode, "cache_home", fail)
    assert_nothing_changes({DONT_WRITE_VARIABLE: "1"})


def test_the_next_process_loads_the_bytecode(source: Path, tmp_path: Path) -> None:
    program = f"""
import os, sys
sys.path.insert(0, {str(source.parents[1])!r})
from peagle.cli.bytecode import keep_bytecode
keep_bytecode(os.environ, {PACKAGE!r})
import {PACKAGE}
print({PACKAGE}.value)
"""
    assert run_python(program) == ["1"]
    compiled = source.stat().st_mtime
    source.write_text("value = 2\n")
    os.utime(source, (compiled, compiled))
    assert run_python(program) == [
        "1"
    ]  # Python does not compile the source again, because its time and size are unchanged.
    os.utime(source, (compiled, compiled + 2))
    assert run_python(program) == ["2"]
    assert not list(source.parent.rglob("*.pyc"))
    assert list((tmp_path / "home" / "bytecode").rglob("*.pyc"))


def test_processes_that_the_command_line_starts(tmp_path: Path) -> None:
    program = """
import subprocess, sys
import peagle.cli
from peagle.server.supervisor.launch_spec import inherited_environment
assert "torch" not in sys.modules
child = "import sys, typer; print(sys.pycache_prefix, sys.dont_write_bytecode, typer.__cached__)"
subprocess.run([sys.executable, "-c", child], env=inherited_environment(), check=True)
"""
    write_package(tmp_path / "packages", "torch", "raise ImportError('only found')")
    path = os.pathsep.join([str(tmp_path / "packages"), *filter(None, sys.path)])
    words = run_python(program, PYTHONPATH=path, PEAGLE_HOME=str(tmp_path / "home"))
    folder = tmp_path / "home" / "bytecode"
    assert words[:2] == [str(folder), "False"]
    assert Path(words[2]).is_relative_to(folder) and Path(words[2]).exists()
