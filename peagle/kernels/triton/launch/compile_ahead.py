"""Compile kernels on several threads or in several processes before they are launched.

Triton compiles a kernel at its first launch, one after the other. Here a pass runs once without
launching anything: each launch only starts the compilation of its kernel, which ends up in Triton's
cache on disk. Each is compiled by a process of kernels/compile_processes.py where that was started,
else by a thread. Compiling releases the interpreter lock for most of its time, but not for all.

    passes run dry        launch a, launch b, launch a, ...    a few milliseconds each
    threads, processes    compile a | compile b | ...
    the real passes       read a and b from the cache

A pass that comes later may start its compilations earlier (`wait=False`): probes and steps then
share them, instead of waiting for each other's slowest kernel.

A later start reads them from the cache at once. So that it need not run passes dry to find that
out, a file in the cache says for what kernels were compiled (compiled_marker.py).

While a pass runs dry, its tensors hold zeros instead of results, which are valid as indices too.
"""

import json
import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from peagle.kernels.compile_processes import CompileProcesses, compile_processes
from peagle.kernels.triton.launch.compiled_marker import CompiledMarker
from peagle.kernels.triton.launch.kernel_job import KernelJob, compile_kernel
from peagle.machine import usable_cores

try:
    import triton
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction
except ImportError:  # without Triton there is nothing to compile
    triton = None

log = logging.getLogger(__name__)
MAX_THREADS = 16
# One thread records at a time: each restores what it has replaced in Triton.
RECORDING_LOCK = threading.Lock()
_state = threading.local()
KernelKey = tuple[str, str, str]  # function, specialization, kind of GPU
POINTER_ALIGNMENT = 16  # bytes: Triton compiles other code for pointers that are not aligned


def compile_ahead(
    work: Callable[[], object],
    device: torch.device,
    description: str | None = None,
    wait: bool = True,
) -> None:
    """Compile the kernels that `work` launches on a GPU. Nothing is launched; elsewhere a no-op.

    `description`: what the kernels depend on, besides their code and the device. If the cache holds
    kernels for it, nothing is done. `wait` False: only start the compilations; whoever launches the
    kernels calls this again before, and with the same description `work` is not run again. What
    fails here is done again, and fails, when the kernels are launched.
    """
    if triton is None or device.type != "cuda":
        return
    marker = None
    if description is not None:
        marker = CompiledMarker(f"{torch.cuda.get_device_name(device)}\n{description}")
        if marker.exists():
            return
    compiler = shared_compiler()
    kernels = compiler.started.get((device, description))
    complete = True
    if kernels is None:
        with compiler.recording() as kernels:
            complete = run_dry(work, logging.WARNING if wait else logging.DEBUG)
        if complete and description is not None:
            compiler.started[device, description] = kernels
    if wait:
        wait_for(kernels)
        if complete and marker is not None:
            marker.write()


def is_dry() -> bool:
    """Whether launches of this thread only start compilations: work may leave out repetitions."""
    return getattr(_state, "is_dry", False)


def run_dry(work: Callable[[], object], level: int) -> bool:
    """Returns False, and logs it, if the work fails."""
    try:
        work()
        return True
    except Exception:
        log.log(level, "not all kernels could be compiled ahead", exc_info=True)
        return False


class KernelCompiler:
    """Threads that compile the kernels launched while recording; leaving it waits for them."""

    def __init__(self, threads: int, processes: CompileProcesses | None = None) -> None:
        """`processes`: compile kernels where they can, and threads wait for them."""
        self.kernels: dict[KernelKey, Future[None]] = {}
        # By device and description: the kernels of passes that were run dry.
        self.started: dict[tuple[torch.device, str | None], list[Future[None]]] = {}
        self._executor = ThreadPoolExecutor(threads, "peagle-compile")
        self._processes = processes

    def __enter__(self) -> "KernelCompiler":
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown()

    @contextmanager
    def recording(self) -> Iterator[list[Future[None]]]:
        """Launches of this thread only start compilations; those of other threads are launches.

        Yields the compilations of kernels that the launches need, also those started before.
        """
        kernels: list[Future[None]] = []
        with (
            RECORDING_LOCK,
            self._replaced_launches(kernels),
            torch.inference_mode(),
            ZeroedMemory(),
        ):
            _state.is_dry = True
            try:
                yield kernels
            finally:
                _state.is_dry = False

    @contextmanager
    def _replaced_launches(self, kernels: list[Future[None]]) -> Iterator[None]:
        thread = threading.get_ident()
        launches = set[Hashable]()  # What `launch_key` says of those seen.
        launch = JITFunction.run
        other_hook = triton.knobs.runtime.jit_cache_hook

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            if threading.get_ident() != thread:
                return launch(function, *args, grid=grid, warmup=warmup, **options)
            key = launch_key(function, args, options)
            if key in launches:  # The layers of a model repeat each other's launches.
                return None
            launches.add(key)
            return launch(function, *args, grid=grid, warmup=True, **options)

        def before_compiling(**details: Any) -> bool:
            if threading.get_ident() == thread:
                kernels.append(self._submit(details["fn"].jit_function, details["compile"]))
                return True  # Triton leaves the kernel alone.
            return bool(other_hook and other_hook(**details))

        triton.knobs.runtime.jit_cache_hook = before_compiling
        JITFunction.run = run
        try:
            yield
        finally:
            JITFunction.run = launch
            triton.knobs.runtime.jit_cache_hook = other_hook

    def _submit(self, function: Any, details: dict[str, Any]) -> Future[None]:
        specialization = details["specialization_data"]
        target = triton.runtime.driver.active.get_current_target()
        key = (f"{function.__module__}.{function.__name__}", specialization, str(target))
        if key in self.kernels:
            return self.kernels[key]
        source = ASTSource(
            function, details["signature"], details["constants"], details["configs"][0]
        )
        options = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in json.loads(specialization)["options"].items()
        }
        self.kernels[key] = self._executor.submit(self._compile, source, target, options)
        return self.kernels[key]

    def _compile(self, source: Any, target: Any, options: dict[str, Any]) -> None:
        if self._processes is not None:
            job = KernelJob.create(source, target, options)
            if job is not None and self._processes.compile(job):
                return
        try:
            compile_kernel(source, target, options)
        except Exception:  # The launch fails, too, and reports it.
            log.debug("a kernel was not compiled ahead", exc_info=True)


@cache
def shared_compiler() -> KernelCompiler:
    """One for all engines of a process, whose threads wait when nothing is to be compiled."""
    return KernelCompiler(min(usable_cores(), MAX_THREADS), compile_processes())


def launch_key(function: Any, args: Sequence[Any], options: dict[str, Any]) -> Hashable:
    """Equal only for launches that need the same kernel; Triton would take longer to find out.

    A kernel depends on the types of tensors and the alignment of their addresses, not on where they
    are. Numbers and constants are compared by value.
    """
    return id(function), *map(_argument_key, (*args, *options.values())), *options


def _argument_key(argument: Any) -> Hashable:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % POINTER_ALIGNMENT == 0
    return type(argument), argument


class ZeroedMemory(TorchDispatchMode):
    """Tensors that are allocated without values get zeros."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.__name__.startswith(("empty", "new_empty")):
            result.zero_()
        return result
