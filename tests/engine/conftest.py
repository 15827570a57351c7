"""Fixtures of the engine tests."""

from tests.support.kernels.cpu_levels import cpu_level

__all__ = ["cpu_level"]
