"""The folder in which Triton keeps compiled kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from peagle.doctor.gpu import GpuFacts, triton_cache
from peagle.doctor.report import gpu_lines
from peagle.paths import TRITON_CACHE_VARIABLE, keep_triton_cache


def test_the_cache_is_under_peagle_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "new"))
    monkeypatch.delenv(TRITON_CACHE_VARIABLE, raising=False)
    environment: dict[str, str] = {}
    keep_triton_cache(environment)
    folder = str(tmp_path / "new" / "triton")
    assert environment == {TRITON_CACHE_VARIABLE: folder}
    assert triton_cache() == folder
    assert TRITON_CACHE_VARIABLE not in os.environ and not (tmp_path / "new").exists()


def test_variables_of_the_user_are_kept() -> None:
    environment = {TRITON_CACHE_VARIABLE: "/elsewhere"}
    keep_triton_cache(environment)
    assert environment == {TRITON_CACHE_VARIABLE: "/elsewhere"}


def test_an_unwritable_peagle_home_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "file"))
    environment: dict[str, str] = {}
    keep_triton_cache(environment)
    assert environment == {}


def test_the_variable_is_set_before_triton_is_imported(tmp_path: Path) -> None:
    program = """
import builtins, os, sys
original, seen = builtins.__import__, []
def watched(name, *args, **kwargs):
    if name == "triton" and not seen:
        seen.append(os.environ.get("TRITON_CACHE_DIR"))
    return original(name, *args, **kwargs)
builtins.__import__ = watched
import peagle.kernels.triton
print(seen[0])
"""
    environment = {**os.environ, "PEAGLE_HOME": str(tmp_path)}
    environment.pop(TRITON_CACHE_VARIABLE, None)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(tmp_path / "triton")


def test_the_doctor_shows_the_cache() -> None:
    facts = GpuFacts("H200", 10**9, 10**9, "580.1", "13.0", "3.7.1", None, "/home/triton")
    assert ("", "compiled kernels are kept in /home/triton") in gpu_lines(facts)
