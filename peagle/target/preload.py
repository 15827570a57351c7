"""Load torch's libraries and create the CUDA context while Python imports other modules.

Loading the libraries of CUDA and creating a context take seconds, hold no lock of the interpreter
when they are called as here, and are needed by every engine:

    thread      dlopen libtorch ...                               | cuInit, context of the device
    main        import numpy, transformers' requirements, ...     | import torch
    processes   import torch, to compile kernels (kernels/compile_processes.py), if there are none

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

from peagle.kernels.compile_processes import start_compile_processes
from peagle.kernels.compiler_hash import hash_compiler
from peagle.machine import has_visible_gpu
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
    on_gpu = uses_gpu(device)
    if on_gpu:
        start_compile_processes()
    loaded = threading.Event()
    thread = threading.Thread(target=load_libraries, args=(device, loaded), daemon=True)
    thread.start()
    with without_command_lines():
        for name in LATER_MODULES:
            with suppress(ImportError):
                import_module(name)
    if on_gpu and not loaded.is_set():  # `import torch` would wait for the libraries.
        hash_compiler()


def uses_gpu(device: str) -> bool:
    """Whether engines will probably run on a GPU; torch is not asked yet."""
    folder = library_folder()
    has_cuda = folder is not None and (folder / CUDA_LIBRARY).exists()
    return device != "cpu" and has_cuda and has_visible_gpu()


def library_folder() -> Path | None:
    """The folder of torch's libraries; None: torch is not installed."""
    spec = find_spec("torch")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "lib"


def load_libraries(device: str, loaded: threading.Event) -> None:
    """`loaded` is set before the context is created, and also if nothing could be loaded."""
    folder = library_folder()
    if folder is None:
        loaded.set()
        return
    with suppress(OSError, AttributeError, ValueError):
        try:
            process = ctypes.CDLL(None)
            process.dlopen.restype = ctypes.c_void_p
            for name, flags in LIBRARIES.items():
                process.dlopen(os.fsencode(folder / name), flags)
        finally:
            loaded.set()
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
