"""Fixtures of the kernel tests."""

import importlib.util
from functools import cache

import pytest

from peagle.kernels.cpu import library
from peagle.kernels.cpu.compiler import compiler_names
from peagle.kernels.cpu.level import LEVEL_VARIABLE
from tests.support.cpu_features import LEVELS


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


@cache
def library_of(level: str) -> library.LoadResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LEVEL_VARIABLE, level)
        return library.load_library(compiler_names())


@pytest.fixture(params=LEVELS)
def cpu_level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each level that this CPU supports: its library is the one in use."""
    level = request.param.name
    result = library_of(level)
    if result.library is None:
        pytest.skip(result.state)
    monkeypatch.setattr(library, "_load_once", lambda: result)
    return str(level)
