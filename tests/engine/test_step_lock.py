"""StepLock: a thread that takes it again and again does not keep it from others."""

import threading
import time

from peagle.engine.step.step_lock import StepLock


def test_the_lock_changes_hands_after_one_step() -> None:
    lock = StepLock()
    steps = 0
    stopped = threading.Event()

    def run_steps() -> None:
        nonlocal steps
        while not stopped.is_set():
            with lock:
                time.sleep(0.001)
                steps += 1

    thread = threading.Thread(target=run_steps)
    thread.start()
    waited = []
    try:
        for _ in range(20):
            before = steps
            with lock:
                waited.append(steps - before)
            time.sleep(0.005)
    finally:
        stopped.set()
        thread.join()
    # The step that runs, and one that may start before this thread asks for the lock.
    assert max(waited) <= 2, waited


def test_one_thread_at_a_time() -> None:
    lock = StepLock()
    inside = 0
    total = 0

    def work() -> None:
        nonlocal inside, total
        for _ in range(200):
            with lock:
                inside += 1
                assert inside == 1
                total += 1
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total == 800
