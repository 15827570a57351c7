"""CompiledMarker: a file in Triton's cache which says that the kernels of an engine are there."""

import hashlib
import os
from functools import cache
from pathlib import Path

import torch

from peagle.kernels.compile_processes import MARKER_PREFIX

try:
    import triton
except ImportError:  # without Triton there is nothing to compile
    triton = None

KERNELS = Path(__file__).parents[1]


@cache
def sources_digest() -> bytes:
    """Of the kernels' source and the compiler."""
    digest = hashlib.sha256(f"{torch.__version__} {triton.__version__}".encode())
    for file in sorted(KERNELS.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.digest()


class CompiledMarker:
    """It lies in the cache itself, and is lost with it."""

    def __init__(self, description: str) -> None:
        """`description`: what the kernels depend on, besides their source and the compiler."""
        digest = hashlib.sha256(description.encode())
        digest.update(sources_digest())
        folder = Path(triton.knobs.cache.dir)
        self.path = folder / f"{MARKER_PREFIX}{digest.hexdigest()[:32]}"

    def exists(self) -> bool:
        return self.path.exists()

    def write(self) -> None:
        """A cache that cannot be written is no error: the next start compiles again."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = self.path.with_suffix(f".{os.getpid()}")
            beside.touch()
            beside.replace(self.path)
        except OSError:
            pass
