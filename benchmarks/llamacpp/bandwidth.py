"""The memory bandwidth of this machine: read_loop.c, compiled and run by all threads."""

import subprocess
import tempfile
from pathlib import Path

from peagle.kernels.cpu.compiler import compiler_names, installed

SOURCE = Path(__file__).with_name("read_loop.c")
BUFFER_BYTES = 1 << 30  # much more than any cache
PASSES = 4


class ReadLoop:
    """The compiled loop; `best` is the highest bandwidth so far, None without a C compiler."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.best: float | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._program = Path(self._folder.name) / "read_loop"
        compiler = next(installed(compiler_names()), None)
        if compiler is not None:
            flags = ["-O3", "-march=native", "-pthread"]
            subprocess.run([compiler, *flags, str(SOURCE), "-o", str(self._program)], check=True)

    def measure(self, buffer_bytes: int = BUFFER_BYTES) -> None:
        """Read the buffer a few times: about a second."""
        if not self._program.exists():
            return
        numbers = map(str, (self.threads, buffer_bytes, PASSES))
        done = subprocess.run(
            [str(self._program), *numbers], check=True, capture_output=True, text=True
        )
        self.best = max(self.best or 0.0, float(done.stdout))
