"""Marks for tests that need the C kernels, and the tested levels of the kernels."""

import pytest

from peagle.kernels.cpu.level import NATIVE, supported_levels
from peagle.kernels.cpu.library import library

needs_c = pytest.mark.skipif(library() is None, reason="no C compiler")
# A library takes half a minute to compile: the levels that few users have are tested by
# `make test-slow`.
COMMON_LEVELS = (NATIVE.name, "avx2")
LEVELS = [
    pytest.param(
        level, marks=[] if level.name in COMMON_LEVELS else pytest.mark.slow, id=level.name
    )
    for level in supported_levels()
]
