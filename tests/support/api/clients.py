"""The official clients, imported by the tests that use them: all workers collect every test.

`clients.openai.OpenAI` is the class of that package.
"""

from importlib import import_module
from types import ModuleType

PACKAGES = ("anthropic", "openai")


def __getattr__(name: str) -> ModuleType:
    if name not in PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(name)
