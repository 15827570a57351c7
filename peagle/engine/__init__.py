"""The engine: many requests at once on one machine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle.engine.config import EngineConfig
    from peagle.engine.engine import Engine

__all__ = ["Engine", "EngineConfig"]


def __getattr__(name: str) -> Any:
    """Import torch only for the engine itself: a web server reads streams without it."""
    if name == "Engine":
        from peagle.engine.engine import Engine

        return Engine
    if name == "EngineConfig":
        from peagle.engine.config import EngineConfig

        return EngineConfig
    raise AttributeError(f"module 'peagle.engine' has no attribute {name!r}")
