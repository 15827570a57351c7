"""Triton's hash of its own compiler, computed while there is nothing else to do.

The name of a kernel in Triton's cache contains the hash of all files of Triton, whose library has
460 MB: 0.3 s and more. Triton computes it when the first kernel is compiled or read from the cache,
and on several threads several times.
"""

from contextlib import suppress
from importlib import import_module

MODULES = ("triton.runtime.cache", "triton.compiler.compiler")  # By Triton's version.


def hash_compiler() -> None:
    """Let Triton compute its hash, which it then keeps for this process."""
    for name in MODULES:
        with suppress(ImportError, AttributeError, OSError):
            import_module(name).triton_key()
            return
