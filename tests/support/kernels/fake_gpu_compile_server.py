"""The server of kernels/compile_processes.py, for machines without a GPU."""

import os
import sys

from filelock import FileLock

from peagle.kernels.compile_server import main
from tests.support.kernels import fake_gpu

GATE_VARIABLE = "FAKE_GPU_SERVER_GATE"  # The server starts when this file is no longer locked.

if __name__ == "__main__":
    if gate := os.environ.get(GATE_VARIABLE):
        with FileLock(gate):
            pass
    fake_gpu.set_active()  # NVIDIA's driver replaces it where there is one.
    main([int(argument) for argument in sys.argv[1:]])
