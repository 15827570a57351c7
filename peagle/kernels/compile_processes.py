"""Processes that compile Triton's kernels, started before this process imports torch.

Triton holds the interpreter lock while it translates a kernel's Python code: about 3 of the 23 CPU
seconds that the 68 kernels of `peagle generate` take. Threads of one process wait for each other
there, and the thread that launches kernels waits for all of them. A process has its own lock:

    this process   import torch, transformers | load weights | launch 1 2 3 ... (compile_ahead.py)
    server         import torch, kernels | fork
    its children                                             | compile 1 | compile 2 | ...

Compiled kernels come back through Triton's cache on disk. Where no process can compile a kernel, a
thread of this one does. Nothing here imports torch.
"""

import os
import pickle
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import Empty, SimpleQueue

from peagle.kernels.sources_digest import marker_prefix
from peagle.machine import usable_cores
from peagle.paths import TRITON_CACHE_VARIABLE, keep_triton_cache

SERVER_MODULE = "peagle.kernels.compile_server"
PROCESSES_VARIABLE = "PEAGLE_COMPILE_PROCESSES"  # "0": start none.
MIN_CORES = 4  # With fewer, importing torch twice costs more than it saves.
MAX_PROCESSES = 16
DEFAULT_CACHE = Path("~/.triton/cache")  # Triton's own
_started: "CompileProcesses | None" = None


class CompileProcesses:
    """Connections to processes, each of which compiles one kernel at a time."""

    def __init__(self, count: int) -> None:
        pipes = [Pipe() for _ in range(count)]
        theirs = [their.fileno() for _, their in pipes]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", SERVER_MODULE, *map(str, theirs)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=server_environment(),
            pass_fds=theirs,
        )
        for _, their in pipes:
            their.close()
        threading.Thread(target=process.wait, daemon=True).start()
        self._starting: SimpleQueue[Connection] = SimpleQueue()
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        for own, _ in pipes:
            self._starting.put(own)

    def compile(self, job: object) -> bool:
        """Let an idle process run `job.compile()`, and wait for it.

        Returns False if none has done it: the server still imports, all are busy or have ended, or
        the job cannot be sent.
        """
        try:
            message = pickle.dumps(job)
        except Exception:  # Whatever some object raises that is not made to be sent.
            return False
        connection = self._take()
        if connection is None:
            return False
        try:
            connection.send_bytes(message)
            done = bool(connection.recv())
        except (OSError, EOFError):  # The process has ended.
            connection.close()
            return False
        self._idle.put(connection)
        return done

    def _take(self) -> Connection | None:
        """A process that is idle, or has just been started."""
        with suppress(Empty):
            return self._idle.get_nowait()
        try:
            connection = self._starting.get_nowait()
        except Empty:
            return None
        try:
            if connection.poll():
                connection.recv()  # Each says once that it is ready.
                return connection
        except (OSError, EOFError):
            connection.close()
            return None
        self._starting.put(connection)
        return None


def server_environment() -> dict[str, str]:
    """The server finds modules where this process does, and not in the working directory."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def start_compile_processes() -> None:
    """Start processes where kernels are to be compiled, and return at once.

    A machine whose cache holds the kernels of some engine needs few others, if any.
    """
    global _started
    keep_triton_cache(os.environ)
    cores = usable_cores()
    is_disabled = os.environ.get(PROCESSES_VARIABLE) == "0"
    if _started is not None or is_disabled or cores < MIN_CORES or has_compiled_kernels():
        return
    with suppress(OSError):
        _started = CompileProcesses(min(cores, MAX_PROCESSES))


def compile_processes() -> CompileProcesses | None:
    return _started


def has_compiled_kernels() -> bool:
    """Whether the cache holds kernels of some engine, from these sources and this compiler."""
    folder = Path(os.environ.get(TRITON_CACHE_VARIABLE) or DEFAULT_CACHE).expanduser()
    return any(folder.glob(f"{marker_prefix()}*"))
