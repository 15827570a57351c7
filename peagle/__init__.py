"""P-EAGLE, parallel speculative decoding: the same tokens in less time.

>>> import peagle
>>> pair = peagle.load("smollm2-135m")
>>> print(pair.generate("Why is the sky blue?", k=7).text)
"""

import os
import sys
from typing import TYPE_CHECKING, Any

from peagle.openmp import avoid_spinning

if "torch" not in sys.modules:
    avoid_spinning(os.environ)

__version__ = "0.1.0"
__all__ = ["Engine", "EngineConfig", "Grammar", "LoadedPair", "UserError", "load"]

from peagle.errors import UserError
from peagle.grammar import Grammar

if TYPE_CHECKING:
    from peagle.engine import Engine, EngineConfig
    from peagle.loaded import LoadedPair, load


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when needed, so that `peagle --help` is fast."""
    if name in ("load", "LoadedPair"):
        from peagle import loaded

        return getattr(loaded, name)
    if name in ("Engine", "EngineConfig"):
        from peagle import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'peagle' has no attribute {name!r}")
