"""Kernels are compiled ahead by threads; real launches find them in Triton's cache.

The scripts run in separate processes without Triton's interpreter, for a simulated GPU
(tests/support/kernels/fake_gpu.py).
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.script_server import script_server

pytest.importorskip("triton")
RunScript = Callable[[str], dict[str, Any]]
BEGIN = """
import json, os, threading
import torch, triton
from tests.support.kernels import fake_gpu
fake_gpu.set_active()
from peagle.kernels.triton import argmax
from peagle.kernels.triton.launch.compile_ahead import KernelCompiler
hits = []
def listen(*, cache_hit, **_):
    hits.append(cache_hit)
triton.knobs.compilation.listener = listen
out = torch.empty(8, dtype=torch.int32)
def launch(pieces, warmup=False):
    x = torch.empty(8)
    argmax._merge_kernel.run(x, out, x, out.long(), pieces, grid=(8,), warmup=warmup, BLOCK=8)
"""


@pytest.fixture(scope="module")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunScript]:
    """Run a script with an empty cache; return the JSON object that it prints."""
    with script_server(BEGIN, TRITON_INTERPRET="0") as server:

        def run(script: str) -> dict[str, Any]:
            cache = tmp_path_factory.mktemp("cache")
            begin = f"os.environ['TRITON_CACHE_DIR'] = {str(cache)!r}"
            output = server.run(f"{begin}\n{script}")
            return dict(json.loads(output.splitlines()[-1]))

        yield run


def test_launches_use_kernels_compiled_ahead(run_script: RunScript) -> None:
    script = """
with KernelCompiler(2) as compiler, compiler.recording():
    for pieces in (1, 2, 3, 16):  # 2 and 3 need the same kernel
        launch(pieces)
    fresh = torch.empty(1000)
    zeros = bool((fresh == 0).all())
compiled = list(hits)
for pieces in (1, 2, 16, 5):
    launch(pieces, warmup=True)
print(json.dumps({"compiled": compiled, "launched": hits[len(compiled):], "zeros": zeros}))
"""
    result = run_script(script)
    assert result["compiled"] == [False] * 3
    assert result["launched"] == [True] * 3  # From the cache on disk; the last one is in memory.
    assert result["zeros"]


def test_repeated_launches_are_recorded_once(run_script: RunScript) -> None:
    """Triton is called once for launches that need the same kernel."""
    script = """
from triton.runtime.jit import JITFunction
asked = []
plain = JITFunction.run
def run(function, *args, **options):
    asked.append(options)
    return plain(function, *args, **options)
JITFunction.run = run
half = torch.empty(9)[1:]
with KernelCompiler(2) as compiler, compiler.recording():
    for _ in range(5):
        launch(16)
    launch(1)
    once = len(asked)
    argmax._merge_kernel.run(half, out, half, out.long(), 16, grid=(8,), warmup=False, BLOCK=8)
print(json.dumps({"once": once, "unaligned": len(asked), "kernels": len(compiler.kernels)}))
"""
    assert run_script(script) == {"once": 2, "unaligned": 3, "kernels": 3}


def test_recording_never_launches_kernels(run_script: RunScript) -> None:
    """The fake driver cannot launch: a launch would raise."""
    script = """
launch(4, warmup=True)
with KernelCompiler(2) as compiler, compiler.recording():
    launch(4)
try:
    launch(4)
    raised = False
except Exception:
    raised = True
print(json.dumps({"kernels": len(compiler.kernels), "raised": raised}))
"""
    assert run_script(script) == {"kernels": 0, "raised": True}


def test_other_threads_compile_and_launch_as_usual(run_script: RunScript) -> None:
    script = """
with KernelCompiler(2) as compiler, compiler.recording():
    thread = threading.Thread(target=launch, args=(4, True))
    thread.start()
    thread.join()
    before = len(compiler.kernels), len(hits)
print(json.dumps({"before": before}))
"""
    assert run_script(script) == {"before": [0, 1]}


def test_recordings_of_several_threads_exclude_each_other(run_script: RunScript) -> None:
    """Launches are restored after two engines were built at the same time."""
    script = """
import time
from triton.runtime.jit import JITFunction
plain = JITFunction.run
first_records = threading.Event()
def record_first():
    with KernelCompiler(1) as compiler, compiler.recording():
        first_records.set()
        time.sleep(0.5)
def record_second():
    first_records.wait()
    with KernelCompiler(1) as compiler:
        recording = compiler.recording()
        recording.__enter__()
        threads[0].join()  # Without the lock, the first recording ends here.
        recording.__exit__(None, None, None)
threads = [threading.Thread(target=work) for work in (record_first, record_second)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
hook = triton.knobs.runtime.jit_cache_hook
print(json.dumps({"restored": JITFunction.run is plain, "hook": hook}, default=str))
"""
    assert run_script(script) == {"restored": True, "hook": None}


def test_compile_errors_are_raised_at_launch(run_script: RunScript) -> None:
    script = """
from peagle.kernels.triton.launch.compile_ahead import compile_ahead
with KernelCompiler(1) as compiler:
    compiler._compile(None, None, {})
def work():
    launch(16)
    raise ValueError
compile_ahead(work, torch.device("cpu"))
nothing = list(hits)
compile_ahead(work, torch.device("cuda"))
hook = triton.knobs.runtime.jit_cache_hook
print(json.dumps({"nothing": nothing, "compiled": hits, "hook": hook}))
"""
    assert run_script(script) == {"nothing": [], "compiled": [False], "hook": None}


def test_compilations_started_earlier_are_awaited(run_script: RunScript) -> None:
    """The first pass only starts a compilation; the second waits for it without compiling again."""
    script = """
from peagle.kernels.triton.launch import compile_ahead as module
gate = threading.Event()
compile_kernel = module.compile_kernel
def compile_later(*args):
    gate.wait()
    compile_kernel(*args)
module.compile_kernel = compile_later
device = torch.device("cuda")
module.compile_ahead(lambda: launch(16), device, wait=False)
before = len(hits)
threading.Timer(0.2, gate.set).start()
module.compile_ahead(lambda: launch(16), device)
print(json.dumps({"before": before, "after": hits}))
"""
    assert run_script(script) == {"before": 0, "after": [False]}


PROCESSES = """
from peagle.kernels import compile_processes
from peagle.kernels.compile_processes import CompileProcesses
compile_processes.SERVER_MODULE = "tests.support.kernels.fake_gpu_compile_server"
from tests.support.waiting import wait_for
def wait_until_ready(processes, count=1):
    connections = [processes._starting.get() for _ in range(count)]
    for connection in connections:
        wait_for(connection.poll)
        processes._starting.put(connection)
def start(count=1):
    processes = CompileProcesses(count)
    wait_until_ready(processes, count)
    return processes
def record(processes, pieces):
    with KernelCompiler(2, processes) as compiler, compiler.recording():
        launch(pieces)
"""


@pytest.mark.slow
def test_launches_use_kernels_compiled_by_processes(run_script: RunScript) -> None:
    script = """
processes = start(2)
for pieces in (1, 2, 16):
    record(processes, pieces)
here = list(hits)
for pieces in (1, 2, 16):
    launch(pieces, warmup=True)
print(json.dumps({"here": here, "launched": hits}))
"""
    assert run_script(PROCESSES + script) == {"here": [], "launched": [True] * 3}


@pytest.mark.slow
def test_threads_compile_while_processes_start(run_script: RunScript, tmp_path: Path) -> None:
    """A lock delays the start of the process, which takes the next job after that."""
    script = f"""
from filelock import FileLock
from tests.support.kernels.fake_gpu_compile_server import GATE_VARIABLE
os.environ[GATE_VARIABLE] = {str(tmp_path / "gate")!r}
with FileLock(os.environ[GATE_VARIABLE]):
    processes = CompileProcesses(1)
    record(processes, 1)
here = list(hits)
wait_until_ready(processes)
record(processes, 2)
print(json.dumps({{"here": here, "afterwards": hits[len(here):]}}))
"""
    assert run_script(PROCESSES + script) == {"here": [False], "afterwards": []}


@pytest.mark.slow
def test_threads_compile_if_a_process_has_ended(run_script: RunScript) -> None:
    """A process ends while it compiles, and a program cannot be started."""
    script = """
class Ending:
    def __reduce__(self):
        return os._exit, (1,)
processes = start()
ended = processes.compile(Ending())
record(processes, 1)
compile_processes.SERVER_MODULE = "peagle.kernels.there_is_none"
record(start(), 2)
print(json.dumps({"ended": ended, "here": hits}))
"""
    assert run_script(PROCESSES + script) == {"ended": False, "here": [False, False]}


@pytest.mark.slow
def test_threads_compile_if_a_process_fails(run_script: RunScript) -> None:
    """The process takes the next job after a failure."""
    script = """
from dataclasses import replace
from peagle.kernels.triton.launch.kernel_job import KernelJob
create = KernelJob.create
def create_broken(*args):
    return replace(create(*args), function="missing")
processes = start()
KernelJob.create = create_broken
record(processes, 1)
failed = list(hits)
KernelJob.create = create
record(processes, 2)
print(json.dumps({"failed": failed, "here": hits}))
"""
    assert run_script(PROCESSES + script) == {"failed": [False], "here": [False]}


@pytest.mark.slow
def test_threads_compile_functions_that_processes_cannot_import(run_script: RunScript) -> None:
    script = """
processes = start()
argmax.original, argmax._merge_kernel = argmax._merge_kernel, None
def launch(pieces):
    x = torch.empty(8)
    argmax.original.run(x, out, x, out.long(), pieces, grid=(8,), warmup=False, BLOCK=8)
record(processes, 1)
print(json.dumps({"here": hits}))
"""
    assert run_script(PROCESSES + script) == {"here": [False]}
