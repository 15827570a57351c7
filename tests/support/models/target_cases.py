"""Pairs of an architecture and a method; `make test-slow` runs some of them."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.models.tiny_models import CONFIGS, ENGINE_PATHS


def targets_and_methods(everywhere: Sequence[str], methods: Sequence[str]) -> list[Any]:
    """Parameters ("any_target", "method"); pairs with the code path of another one are slow."""
    return [
        pytest.param(
            name,
            method,
            marks=[] if method in everywhere or name in ENGINE_PATHS else pytest.mark.slow,
        )
        for name in CONFIGS
        for method in methods
    ]
