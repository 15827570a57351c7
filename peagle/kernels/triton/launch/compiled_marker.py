"""CompiledMarker: a file in Triton's cache which says that the kernels of an engine are there."""

import hashlib
import os
from pathlib import Path

from peagle.kernels.sources_digest import marker_prefix

try:
    import triton
except ImportError:  # without Triton there is nothing to compile
    triton = None


class CompiledMarker:
    """It lies in the cache itself, and is lost with it."""

    def __init__(self, description: str) -> None:
        """`description`: what the kernels depend on, besides their source and the compiler."""
        digest = hashlib.sha256(description.encode()).hexdigest()
        self.path = Path(triton.knobs.cache.dir) / f"{marker_prefix()}{digest[:32]}"

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
