"""The official clients, imported on first use, because every test worker imports all tests.

`clients.openai.OpenAI` is the class of that package.
"""

from importlib import import_module
from types import ModuleType

PACKAGES = ("anthropic", "openai")


def __getattr__(name: str) -> ModuleType:
    if name not in PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(name)
