"""The engine: many requests at once on one machine."""

from peagle.engine.config import EngineConfig
from peagle.engine.engine import Engine

__all__ = ["Engine", "EngineConfig"]
