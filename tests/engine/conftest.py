"""Fixtures of the engine tests."""

from tests.support.cpu_levels import cpu_level

__all__ = ["cpu_level"]
