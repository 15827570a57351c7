"""Bytecode of the modules that a command imports is compiled by parallel processes."""

import os
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from peagle.cli import parallel_bytecode
from peagle.cli.parallel_bytecode import (
    FILE_LIST,
    compile_missing,
    loads_models,
    package_folder,
    sources,
    start,
)

PACKAGE = "package_to_compile"
TIMEOUT = 60


@pytest.fixture
def listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A list of files of a package, of a module, and of a package that is not installed."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "bytecode"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(parallel_bytecode, "MIN_FILES", 1)
    monkeypatch.setattr(parallel_bytecode, "usable_cores", lambda: 3)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    package_folder.cache_clear()
    folder = tmp_path / "packages" / PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "part.py").write_text("value = 1\n")
    (folder / "wrong.py").write_text("value = = 1\n")
    (folder.parent / f"{PACKAGE}_module.py").write_text("")
    lines = [f"{PACKAGE}/{name}.py" for name in ("__init__", "wrong", "part", "removed")]
    listing = tmp_path / "list.txt"
    listing.write_text("\n".join([*lines, f"{PACKAGE}_module.py", "not_installed/part.py\n"]))
    return listing


def compiled_files(listing: Path) -> list[str]:
    return [
        Path(source).name for source in sources(listing) if Path(cache_from_source(source)).exists()
    ]


def test_missing_bytecode_is_compiled(listing: Path, tmp_path: Path) -> None:
    process = compile_missing(listing)
    assert process is not None and process.wait(TIMEOUT) == 0
    assert compiled_files(listing) == ["__init__.py", "part.py", f"{PACKAGE}_module.py"]
    assert not list((tmp_path / "packages").rglob("*.pyc"))
    (tmp_path / "packages" / PACKAGE / "wrong.py").write_text("")
    program = f"import {PACKAGE}.part as part; print(part.__cached__, part.value)"
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path / "packages"),
        "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-v", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"code object from '{tmp_path / 'bytecode'}" in done.stderr
    assert f"matches {tmp_path / 'packages' / PACKAGE / 'part.py'}" in done.stderr


def test_no_process_is_started_if_bytecode_exists(
    listing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = compile_missing(listing)
    assert process is not None
    process.wait(TIMEOUT)
    # wrong.py is not valid and has no bytecode.
    monkeypatch.setattr(parallel_bytecode, "MIN_FILES", 2)
    assert compile_missing(listing) is None


def test_no_process_is_started_if_python_writes_no_bytecode(
    listing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert compile_missing(listing) is None


def test_no_process_is_started_on_one_core(listing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_bytecode, "usable_cores", lambda: 1)
    assert compile_missing(listing) is None


def test_no_process_is_started_if_the_folder_is_not_writable(listing: Path, tmp_path: Path) -> None:
    (tmp_path / "bytecode").write_text("")
    assert compile_missing(listing) is None


def test_processes_ignore_a_folder_that_is_not_writable(listing: Path, tmp_path: Path) -> None:
    (tmp_path / "bytecode").write_text("")
    process = start(list(sources(listing)), 2)
    assert process.wait(TIMEOUT) == 0
    assert compiled_files(listing) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/bin/peagle", "generate", "hi"], True),
        (["/bin/serve"], True),  # in a container
        (["/bin/peagle", "pairs", "serve"], False),
        (["/bin/peagle"], False),
    ],
)
def test_commands_that_load_models_are_recognized(arguments: list[str], expected: bool) -> None:
    assert loads_models(arguments) is expected


def test_the_file_list_is_up_to_date() -> None:
    """Only a few imported files may be missing: they differ between versions of a package."""
    listed = set(sources(FILE_LIST))
    script = """
import sys
from peagle.server.engines.engine_factory import import_models
import_models("cpu")
for module in list(sys.modules.values()):
    print(getattr(module, "__file__", ""))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    imported = {
        line
        for line in done.stdout.splitlines()
        if line.endswith(".py") and {"torch", "transformers"} & set(Path(line).parts)
    }
    assert len(imported & listed) > 0.95 * len(imported)
