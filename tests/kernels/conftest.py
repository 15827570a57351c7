"""Fixtures of the kernel tests."""

import importlib.util

import pytest

from tests.support.kernels.cpu_levels import cpu_level

__all__ = ["cpu_level"]


@pytest.fixture(autouse=True)
def patched_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("triton") is not None:
        from tests.support.kernels.triton_interpreter import patch_interpreter

        patch_interpreter(monkeypatch)
