"""The server of kernels/compile_processes.py, also on a machine without a GPU."""

import sys

from peagle.kernels.compile_server import main
from tests.support import fake_gpu

if __name__ == "__main__":
    fake_gpu.set_active()  # NVIDIA's driver replaces it where there is one.
    main([int(argument) for argument in sys.argv[1:]])
