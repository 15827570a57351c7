"""Load torch's libraries and create the CUDA context while Python imports other modules.

Loading the libraries of CUDA and creating a context take seconds, hold no lock of the interpreter
when they are called as here, and are needed by every engine:

    thread     dlopen libtorch ... | cuInit, context of the device |
    main       import numpy, transformers' requirements, ...       | import torch

What fails here is done again, and fails with an error, when torch needs it.
"""

import ctypes
import os
import sys
import threading
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from peagle.target.transformers_import import without_command_lines

# With the flags that torch uses. The second library needs all others.
LIBRARIES = {
    "libtorch_global_deps.so": os.RTLD_NOW | os.RTLD_GLOBAL,
    "libtorch.so": os.RTLD_NOW | os.RTLD_LOCAL,
}
CUDA_LIBRARY = "libtorch_cuda.so"  # A torch for CPUs has none, and needs no context.
# Modules without torch that transformers imports.
LATER_MODULES = (
    *("numpy", "jinja2", "regex", "yaml", "tqdm.auto", "filelock", "PIL.Image"),
    *("safetensors", "tokenizers", "huggingface_hub.file_download", "triton"),
)


def preload(device: str) -> None:
    """Load libraries on a thread, and modules on this one; `device` as in the settings."""
    if "torch" in sys.modules:
        return
    thread = threading.Thread(target=load_libraries, args=(device,), daemon=True)
    thread.start()
    with without_command_lines():
        for name in LATER_MODULES:
            with suppress(ImportError):
                import_module(name)


def load_libraries(device: str) -> None:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return
    folder = Path(spec.origin).parent / "lib"
    with suppress(OSError, AttributeError, ValueError):
        process = ctypes.CDLL(None)
        process.dlopen.restype = ctypes.c_void_p
        for name, flags in LIBRARIES.items():
            process.dlopen(os.fsencode(folder / name), flags)
        if device != "cpu" and (folder / CUDA_LIBRARY).exists():
            create_context(device)


def create_context(device: str) -> None:
    """Create the primary context of a GPU, which torch uses; it counts visible devices only."""
    _, _, index = device.partition(":")
    cuda = ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_int()
    context = ctypes.c_void_p()
    if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(handle), int(index or 0)) == 0:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
