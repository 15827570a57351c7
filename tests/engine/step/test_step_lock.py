"""StepLock: a thread that acquires it repeatedly does not starve other threads."""

import threading

from peagle.engine.step.step_lock import StepLock
from tests.support.waiting import wait_for


def test_a_waiting_thread_gets_the_lock_after_one_step() -> None:
    """The first step ends when the other thread waits, and the same thread asks for the next."""
    for _ in range(20):
        lock = StepLock()
        order: list[str] = []

        def run_steps(lock: StepLock = lock, order: list[str] = order) -> None:
            for _ in range(3):
                with lock:
                    wait_for(lambda: "other" in order or lock._turnstile.locked())
                    order.append("step")

        thread = threading.Thread(target=run_steps)
        thread.start()
        wait_for(lock._lock.locked)
        with lock:
            order.append("other")
        thread.join()
        assert order == ["step", "other", "step", "step"]


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
