"""The program that compiles kernels for another process, in as many children as it has connections.

    python -m peagle.kernels.compile_server DESCRIPTOR ...

compile_processes.py starts it. It uses no GPU, so that its children may be forks. They end when the
other process ends, or has had nothing to compile for a while.
"""

import gc
import os
import pkgutil
import signal
import sys
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection

from peagle.kernels.compiler_hash import hash_compiler

FIRST_JOB_SECONDS = 900.0  # Downloading and loading weights come before the first kernel.
IDLE_SECONDS = 60.0


def main(descriptors: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the other process, and then this.
    connections = [Connection(descriptor) for descriptor in descriptors]
    import_compiler()
    gc.freeze()  # Children share the memory of objects that no collection visits.
    for own in connections:
        if os.fork() == 0:
            for other in connections:
                if other is not own:
                    other.close()
            serve(own)
            os._exit(0)
    for connection in connections:
        connection.close()
    for _ in connections:
        os.wait()


def import_compiler() -> None:
    """Import the kernels and Triton's compiler, and hash the compiler, once for all children."""
    import triton
    from triton.backends import backends

    # Compiles the functions in C with which Triton launches kernels, if its cache lacks them.
    with suppress(Exception):
        triton.runtime.driver.set_active(backends["nvidia"].driver())
    kernels = import_module("peagle.kernels.triton")
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        import_module(module.name)
    hash_compiler()


def serve(connection: Connection) -> None:
    """Run jobs, and answer each with whether it is done."""
    with suppress(OSError, EOFError):
        connection.send(True)
        limit = FIRST_JOB_SECONDS
        while connection.poll(limit):
            job = connection.recv()
            connection.send(compiled(job))
            limit = IDLE_SECONDS


def compiled(job: object) -> bool:
    try:
        job.compile()  # type: ignore[attr-defined]
        return True
    except Exception:
        return False


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
