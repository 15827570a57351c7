"""The thread pool of the C kernels: each index runs once, also with several callers or a fork."""

import ctypes
import multiprocessing
import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from peagle.kernels.cpu.library import SOURCE_FOLDER

COMPILER = next((path for name in ("gcc", "cc", "clang") if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
CALLS = """
#include "pool.h"
#include <pthread.h>
#include <time.h>

struct job { int *runs; pthread_t *by; long sleep, inner; int gather, arrived; };

static void count_inner(void *runs, long i) {
    __atomic_add_fetch((int *)runs, i, __ATOMIC_RELAXED);
}

/* Wait until `gather` threads are here, for 120 seconds at most: then some have not come. */
static void meet(struct job *job) {
    if (__atomic_add_fetch(&job->arrived, 1, __ATOMIC_SEQ_CST) > job->gather) return;
    for (int i = 0; i < 120000; i++) {
        if (__atomic_load_n(&job->arrived, __ATOMIC_SEQ_CST) >= job->gather) return;
        nanosleep(&(struct timespec){0, 1000000}, 0);
    }
}

static void count_run(void *context, long i) {
    struct job *job = context;
    job->runs[i]++; /* a second thread at the same index would be lost, or counted twice */
    if (job->by) job->by[i] = pthread_self();
    if (job->gather) meet(job);
    if (job->sleep) nanosleep(&(struct timespec){0, job->sleep}, 0);
    if (job->inner) parallel_for(job->inner, 4, count_inner, &job->runs[i]);
}

void count_runs(long count, int threads, int *runs, long sleep, long inner) {
    struct job job = {runs, 0, sleep, inner, 0, 0};
    parallel_for(count, threads, count_run, &job);
}

/* The thread of each index. The first indices wait for one another, so all threads get one. */
void record_threads(long count, int threads, int *runs, pthread_t *by) {
    struct job job = {runs, by, 0, 0, threads, 0};
    parallel_for(count, threads, count_run, &job);
}

/* How many of `calls` calls did not run every index once. */
long wrong_calls(long calls, long count, int threads, int *runs) {
    struct job job = {runs, 0, 0, 0, 0, 0};
    long wrong = 0;
    for (long call = 0; call < calls; call++) {
        long size = call % (count + 1);
        parallel_for(size, threads, count_run, &job);
        int bad = 0;
        for (long i = 0; i < count; i++) {
            bad |= runs[i] != (i < size);
            runs[i] = 0;
        }
        wrong += bad;
    }
    return wrong;
}
"""


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("pool")
    (folder / "calls.c").write_text(CALLS)
    assert COMPILER is not None
    sources = [str(SOURCE_FOLDER / "pool.c"), str(folder / "calls.c")]
    flags = ["-O2", "-std=gnu11", "-fPIC", "-shared", "-pthread", f"-I{SOURCE_FOLDER}"]
    subprocess.run([COMPILER, *flags, *sources, "-o", str(folder / "calls.so")], check=True)
    loaded = ctypes.CDLL(str(folder / "calls.so"))
    pointer, long = ctypes.c_void_p, ctypes.c_long
    loaded.count_runs.argtypes = [long, ctypes.c_int, pointer, long, long]
    loaded.record_threads.argtypes = [long, ctypes.c_int, pointer, pointer]
    loaded.wrong_calls.argtypes = [long, long, ctypes.c_int, pointer]
    loaded.wrong_calls.restype = long
    return loaded


def wrong_calls(calls: ctypes.CDLL, number: int, count: int, threads: int) -> int:
    return int(calls.wrong_calls(number, count, threads, (ctypes.c_int * count)()))


@pytest.mark.parametrize(("count", "threads"), [(1, 2), (7, 2), (300, 2), (40, 9), (3, 300)])
def test_every_index_runs_once(calls: ctypes.CDLL, count: int, threads: int) -> None:
    number = 5000 if threads == 2 else 300
    assert wrong_calls(calls, number, count, threads) == 0


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_requested_number_of_threads_runs(calls: ctypes.CDLL, threads: int) -> None:
    runs, by = (ctypes.c_int * 20)(), (ctypes.c_ulong * 20)()
    calls.record_threads(20, threads, runs, by)
    assert list(runs) == [1] * 20 and len(set(by)) == threads


def test_a_call_without_work(calls: ctypes.CDLL) -> None:
    calls.count_runs(0, 4, None, 0, 0)


def test_several_callers_at_once(calls: ctypes.CDLL) -> None:
    """One caller uses the workers, the others compute alone; every index runs for each caller."""
    wrong: list[int] = []

    def call(count: int) -> None:
        wrong.append(wrong_calls(calls, 2000, count, 3))

    threads = [threading.Thread(target=call, args=(size,)) for size in (5, 17, 60, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0] * 4


def test_a_call_within_a_call(calls: ctypes.CDLL) -> None:
    runs = (ctypes.c_int * 50)()
    calls.count_runs(50, 2, runs, 0, 10)
    assert list(runs) == [1 + 45] * 50


# fork with threads is what this test is about
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_process_starts_its_own_workers(calls: ctypes.CDLL) -> None:
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            wrong_calls(calls, 100, 20, 2)

    other = threading.Thread(target=keep_busy)  # keeps the pool in use during some of the forks
    other.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                runs, by = (ctypes.c_int * 20)(), (ctypes.c_ulong * 20)()
                calls.record_threads(20, 3, runs, by)
                good = len(set(by)) == 3 and wrong_calls(calls, 200, 30, 3) == 0
                os._exit(0 if good else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        other.join()


def without_threads(calls: ctypes.CDLL) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (0, 0))  # no memory for the stacks of new threads
    os._exit(wrong_calls(calls, 100, 30, 4))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_work_is_done_if_no_thread_can_be_created(calls: ctypes.CDLL) -> None:
    process = multiprocessing.get_context("fork").Process(target=without_threads, args=(calls,))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_idle_threads_sleep(calls: ctypes.CDLL) -> None:
    """Neither idle workers nor a waiting caller use CPU time."""
    wrong_calls(calls, 10, 20, 4)
    runs = (ctypes.c_int * 2)()
    assert least_cpu_seconds(lambda: time.sleep(0.2)) < 0.02
    assert least_cpu_seconds(lambda: calls.count_runs(2, 2, runs, 200_000_000, 0)) < 0.02


def least_cpu_seconds(work: Callable[[], object], attempts: int = 10) -> float:
    """The lowest CPU time of several attempts, because other threads may use CPU time, too."""
    least = float("inf")
    for _ in range(attempts):
        before = time.process_time()
        work()
        least = min(least, time.process_time() - before)
        if least < 0.02:
            break
    return least
