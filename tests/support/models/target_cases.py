"""Pairs of an architecture and a method, of which some are left to `make test-slow`."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.models.tiny_models import CONFIGS, ENGINE_PATHS


def targets_and_methods(everywhere: Sequence[str], methods: Sequence[str]) -> list[Any]:
    """Parameters ("any_target", "method"): pairs that share their code with another are slow."""
    return [
        pytest.param(
            name,
            method,
            marks=[] if method in everywhere or name in ENGINE_PATHS else pytest.mark.slow,
        )
        for name in CONFIGS
        for method in methods
    ]
