"""The fixture `cpu_level`: a test runs at each level of the C kernels that this CPU supports."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from peagle.kernels.cpu import library
from peagle.kernels.cpu.compiler import compiler_names
from peagle.kernels.cpu.level import LEVEL_VARIABLE, NATIVE, CpuLevel, supported_levels
from tests.support.kernels.cpu_features import COMMON_LEVELS, LEVELS


@cache
def library_of(level: str) -> library.LoadResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LEVEL_VARIABLE, level)
        return library.load_library(compiler_names())


def levels_and(
    cases: Sequence[Any], everywhere: Sequence[Any], slow: Sequence[Any] = ()
) -> list[Any]:
    """Parameters ("cpu_level", a case), of which the first is indirect.

    All levels are one source in C, so levels other than the native one have the cases of
    `everywhere`. `make test-slow` runs the rest, and the cases of `slow` at every level.
    """

    def is_slow(level: CpuLevel, case: Any) -> bool:
        other = level != NATIVE and (level.name not in COMMON_LEVELS or case not in everywhere)
        return other or case in slow

    return [
        pytest.param(
            *(level, case),
            marks=pytest.mark.slow if is_slow(level, case) else [],
            id=f"{level.name}-{case}",
        )
        for level in supported_levels()
        for case in cases
    ]


@pytest.fixture(params=LEVELS)
def cpu_level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each level that this CPU supports: its library is the one in use."""
    level = request.param.name
    result = library_of(level)
    if result.library is None:
        pytest.skip(result.state)
    monkeypatch.setattr(library, "_load_once", lambda: result)
    return str(level)
