"""Fixtures of the kernel tests."""

import importlib.util

import pytest

from tests.support.cpu_levels import cpu_level

__all__ = ["cpu_level"]


@pytest.fixture(autouse=True)
def index_of_one_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter (3.6) convert an array of one element to a loop bound.

    It calls int() on the array, which numpy 2.4 refuses.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    plain = interpreter._patch_lang_tensor

    def patched(tensor, scope) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
