"""Many requests at once: continuous batching over paged keys and values."""

from peagle.engine.engine import Engine

__all__ = ["Engine"]
