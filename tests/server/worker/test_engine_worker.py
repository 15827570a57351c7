"""EngineWorker and EngineLink: slow, late or silent web servers ("fronts"), and engine builds."""

import asyncio
import gc
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from peagle.engine.stream import Stream
from peagle.server import messages
from peagle.server.engine_process import engine_link
from peagle.server.engine_process.engine_link import EngineLink
from peagle.server.engines import driver
from peagle.server.engines.engine_pool import EnginePool
from peagle.server.front.add_message import add_message
from peagle.server.front.generation_params import GenerationParams
from peagle.server.messages import EngineKey, FrontBatch, WorkerBatch
from peagle.server.worker import engine_worker
from peagle.server.worker.engine_worker import EngineWorker
from tests.support.server.serving import SETTINGS, tiny_pair, until
from tests.support.waiting import wait_for

NUMBERS = itertools.count()
LONG = GenerationParams(200, ignore_eos=True)


class RawFront:
    """A front that reads only on demand."""

    def __init__(self, address: str, identity: bytes = b"") -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        if identity:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def send(self, batch: FrontBatch) -> None:
        self.socket.send(messages.encode(batch))

    def receive(self) -> WorkerBatch:
        assert self.socket.poll(120_000), "nothing arrived"
        return messages.decode_worker(self.socket.recv())

    def receive_until(self, found: Any) -> list[WorkerBatch]:
        batches = [self.receive()]
        while not found(batches[-1]):
            batches.append(self.receive())
        return batches


@contextmanager
def started() -> Iterator[tuple[EngineWorker, RawFront]]:
    """A ready engine, and a front that has received its status."""
    address = f"inproc://engine-worker-{next(NUMBERS)}"
    pool = EnginePool(replace(SETTINGS, pair="tiny"), tiny_pair)
    worker = EngineWorker(pool, address)
    front = RawFront(address)
    front.send(FrontBatch())
    pool.start()
    front.receive_until(lambda batch: batch.status and batch.status.target)
    try:
        yield worker, front
    finally:
        front.socket.close()
        pool.close()
        worker.close()


def worker_address(worker: EngineWorker) -> str:
    return worker._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")


def slow_down(worker: EngineWorker, seconds: float) -> None:
    main = worker.pool.main
    assert main is not None
    run = main.engine.loop.run
    main.engine.loop.run = lambda: time.sleep(seconds) or run()  # type: ignore


def test_a_front_learns_at_once_that_the_engine_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front connected before the pair is loaded does not wait for the next periodic status."""
    monkeypatch.setattr(engine_worker, "STATUS_SECONDS", 3600.0)
    with started() as (_, front):
        front.send(FrontBatch(wants_status=True))
        assert front.receive().status


def test_a_long_step_does_not_make_fronts_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their heartbeats are only read after the step."""
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(engine_worker, "time", clock)
    monkeypatch.setattr(engine_worker, "STATUS_SECONDS", 0.0)
    ends: list[str | None] = []
    with started() as (worker, front):
        main = worker.pool.main
        assert main is not None
        run = main.engine.loop.run

        def long_step() -> bool:
            nonlocal now
            assert worker._socket.poll(120_000), "the front is silent"
            now += 2 * engine_worker.FRONT_SILENCE_SECONDS
            return run()

        main.engine.loop.run = long_step  # type: ignore[method-assign]
        add = add_message(1, worker.pool.key, [6, 9], GenerationParams(5, ignore_eos=True))
        front.send(FrontBatch(adds=[add]))
        while not ends or ends[-1] is None:
            front.send(FrontBatch())
            if front.socket.poll(20):
                ends += [output.reason for output in front.receive().outputs]
    assert ends[-1] == "length"


def test_the_status_is_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle driver does not wait for its next polling interval."""
    monkeypatch.setattr(driver, "IDLE_SECONDS", 600.0)
    with started() as (worker, front):
        for _ in range(3):
            worker._next_status = time.monotonic() + 600
            front.send(FrontBatch(wants_status=True))
            front.receive_until(lambda batch: batch.status)


def test_the_supervisor_gets_a_status_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thus no front shows higher counts than the supervisor knows if the process is killed."""
    monkeypatch.setattr(engine_worker, "STATUS_SECONDS", 3600.0)
    sent: list[bytes] = []
    with started() as (worker, front):
        supervisor = RawFront(worker_address(worker), messages.SUPERVISOR_IDENTITY)
        supervisor.send(FrontBatch())
        supervisor.receive()
        front.receive()
        send = worker._send
        monkeypatch.setattr(worker, "_send", lambda to: sent.append(to.identity) or send(to))
        front.send(FrontBatch(wants_status=True))
        assert supervisor.receive().status and front.receive().status
        supervisor.socket.close()
    assert len(sent) == 2 and sent[0] == messages.SUPERVISOR_IDENTITY


def test_requests_of_a_front_that_does_not_read_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front is notified when it reads again, and messages do not accumulate."""
    monkeypatch.setattr(engine_worker, "MAX_UNSENT_MESSAGES", 3)
    with started() as (worker, front):
        main = worker.pool.main
        assert main is not None
        slow_down(worker, 0.005)  # keeps the answer from ending before
        front.send(FrontBatch(adds=[add_message(1, worker.pool.key, [6, 9], LONG)]))
        asyncio.run(until(lambda: main.engine.status()["finished"].get("abort")))
        asyncio.run(until(lambda: main.engine.idle))
        (known,) = worker.fronts.values()
        assert not known.requests and len(known.batch.outputs) <= 2
        batches = front.receive_until(lambda batch: any(o.reason for o in batch.outputs))
        assert batches[-1].outputs[-1].error == engine_worker.NO_RESPONSE
        assert len(batches) < 20
        again = add_message(2, worker.pool.key, [6, 9], GenerationParams(2))
        front.send(FrontBatch(adds=[again]))
        front.receive_until(lambda batch: 2 in batch.accepted)


def test_a_missing_engine_of_a_request_is_built() -> None:
    """A request that waited for an engine may be sent to a new process without that engine."""
    key = EngineKey("eagle3", 2)
    params = GenerationParams(5, ignore_eos=True)
    ends: dict[int, str | None] = {}
    with started() as (worker, front):
        front.send(FrontBatch(adds=[add_message(i, key, [6, 9], params) for i in (1, 2)]))
        while len(ends) < 2:
            batch = front.receive()
            assert not batch.refusals
            ends |= {output.id: output.reason for output in batch.outputs if output.reason}
        assert list(worker.pool.extra.slots) == [key]
    assert ends == {1: "length", 2: "length"}


def test_a_flood_of_messages_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is faster than its front must not prevent it from answering clients."""
    monkeypatch.setattr(engine_link, "MAX_READS", 2)
    monkeypatch.setattr(engine_link, "HEARTBEAT_SECONDS", 600.0)  # A heartbeat also reads messages.
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind("inproc://flood")
    batches: list[WorkerBatch] = []
    reads_by_turn: list[int] = []

    async def main() -> None:
        link = EngineLink("inproc://flood", batches.append)
        await until(lambda: router.poll(0))
        identity, _ = router.recv_multipart()
        for _ in range(20):
            router.send_multipart([identity, messages.encode(WorkerBatch())])
        while len(batches) < 20:
            before = len(batches)
            await asyncio.sleep(0)
            reads_by_turn.append(len(batches) - before)
        link.close()

    asyncio.run(main())
    router.close(0)
    assert len(batches) == 20 and max(reads_by_turn) <= 4  # A turn may read twice.


def test_a_finished_request_is_freed_at_once() -> None:
    """It is freed without the garbage collector, which rarely runs in a server."""
    params = GenerationParams(3, ignore_eos=True)
    with started() as (worker, front):
        gc.collect()
        gc.disable()
        try:
            adds = [add_message(i, worker.pool.key, [6, 9], params) for i in range(1, 9)]
            front.send(FrontBatch(adds=adds))
            ended: set[int] = set()
            while len(ended) < 8:
                ended |= {output.id for output in front.receive().outputs if output.reason}
            name = f"{next(iter(worker.fronts)).hex()}-"

            def is_freed() -> bool:
                streams = [o for o in gc.get_objects() if type(o) is Stream]
                return not any(stream.id.startswith(name) for stream in streams)

            wait_for(is_freed)  # The driver may keep the last one until the end of its iteration.
        finally:
            gc.enable()
