"""The fixture `cpu_level`: a test runs at each level of the C kernels that this CPU supports."""

from functools import cache

import pytest

from peagle.kernels.cpu import library
from peagle.kernels.cpu.compiler import compiler_names
from peagle.kernels.cpu.level import LEVEL_VARIABLE
from tests.support.cpu_features import LEVELS


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
