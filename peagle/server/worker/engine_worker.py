"""EngineWorker: serves the engines of a process to fronts, on one socket.

    ROUTER socket -> adds, aborts, calls -> EnginePool.driver: one step -> outputs, by front

Everything but builds and grammars happens on the driver's thread: between two steps it reads what
has arrived, and sends each front one message with all that the step gave its requests. There is no
second thread that competes for the interpreter.

A front is known from its first message. It is lost when it is gone, or is silent for
FRONT_SILENCE_SECONDS. One that is too far behind with reading keeps its place. In all cases its
requests are aborted, and it learns of it if it reads again. A failed step of the main engine ends
the process: the fronts' requests are then answered by a fresh one (front/engine_client.py).
"""

import logging
import os
import time

import zmq

from peagle.server import messages
from peagle.server.engines.engine_pool import EnginePool
from peagle.server.http.logs import log_event
from peagle.server.messages import SUPERVISOR_IDENTITY, TargetInfo, WorkerStatus
from peagle.server.worker.calls import CallHandler, engine_info
from peagle.server.worker.engine_builds import EngineBuilds
from peagle.server.worker.fronts import Front
from peagle.server.worker.learning import create_learning
from peagle.server.worker.requests import RequestHandler
from peagle.server.worker.socket_event import SocketEvent

STATUS_SECONDS = 0.5
FRONT_SILENCE_SECONDS = 30.0
MAX_UNSENT_MESSAGES = 10_000  # For one front; the requests of one that is so far behind end.
NO_RESPONSE = "the web server did not respond"
ENGINE_FAILED_EXIT_CODE = 3


class EngineWorker:
    def __init__(self, pool: EnginePool, address: str) -> None:
        self.pool = pool
        self.fronts: dict[bytes, Front] = {}
        self.failure: str | None = None
        builds = EngineBuilds(pool)
        self.learning = create_learning(pool, address)
        store = self.learning.store if self.learning is not None else None
        self.requests = RequestHandler(pool, builds, store)
        self.calls = CallHandler(pool, builds)
        self._next_status = 0.0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, MAX_UNSENT_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.bind(address)
        pool.driver.attach(SocketEvent(self._socket), self.run_round)
        pool.on_ready = self._report_status
        pool.on_load_failure = self._report_failure
        pool.on_main_failure = self.end_process

    def run_round(self) -> None:
        """Send what the last step gave, and read what has arrived since."""
        for front in list(self.fronts.values()):
            if front.has_news:
                self._send(front)
        now = time.monotonic()
        self._receive_all(now)
        # After reading: during a long step, the fronts' signs of life have waited to be read.
        if now >= self._next_status:
            self._add_status(now)
        for front in list(self.fronts.values()):
            if front.cannot_wait:  # No step follows that would send it.
                self._send(front)
        if self.learning is not None:
            self.learning.write_load(now)

    def end_process(self) -> None:
        """Send the tokens of earlier steps, and end: the supervisor starts a fresh process."""
        for front in list(self.fronts.values()):
            front.drop_errors()
            self._send(front)
        self.close()
        zmq.Context.instance().term()
        os._exit(ENGINE_FAILED_EXIT_CODE)

    def close(self) -> None:
        self.requests.close()
        if self.learning is not None:
            self.learning.close()
        self._socket.close()

    def _report_status(self) -> None:
        """Let the next round send the status, which the fronts wait for."""
        self._next_status = 0.0

    def _report_failure(self, reason: str) -> None:
        self.failure = reason
        self._report_status()

    def _receive_all(self, now: float) -> None:
        while True:
            try:
                identity, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(identity, payload, now)

    def _receive(self, identity: bytes, payload: bytes, now: float) -> None:
        front = self.fronts.get(identity)
        if front is None:
            front = self._add_front(identity)
            self._next_status = 0.0
        front.last_heard = now
        batch = messages.decode_front(payload)
        for add in batch.adds:
            self.requests.add(front, add)
        for abort in batch.aborts:
            self.requests.abort(front, abort)
        for call in batch.calls:
            self.calls.call(front, call)
        for call_id in batch.ended_calls:
            self.calls.end(front, call_id)
        if batch.wants_status:
            self._next_status = 0.0

    def _add_front(self, identity: bytes) -> Front:
        """The supervisor comes first: if this process dies, its last counts are those that stay."""
        front = Front(identity)
        if identity == SUPERVISOR_IDENTITY:
            self.fronts = {identity: front} | self.fronts
        else:
            self.fronts[identity] = front
        return front

    def _send(self, front: Front) -> None:
        batch = front.take_batch()
        try:
            parts = [front.identity, messages.encode(batch)]
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:  # It does not read; the message waits here, and does not grow.
            front.batch = batch
            self._end_requests(front)
        except zmq.ZMQError as error:
            self._lose(front, str(error))

    def _add_status(self, now: float) -> None:
        """Add the status to the next message to each front; give up those that are silent."""
        self._next_status = now + STATUS_SECONDS
        status = self._status()
        for front in list(self.fronts.values()):
            front.batch.status = status
            if now - front.last_heard > FRONT_SILENCE_SECONDS:
                self._end_requests(front)  # In case it wakes up.
                self._send(front)
                self._lose(front, "it is silent")

    def _end_requests(self, front: Front) -> None:
        """Abort what a front has under way here, and add that to the next message to it."""
        if front.has_work:
            log_event("front does not read", logging.WARNING, live=len(front.requests))
        front.add_errors(NO_RESPONSE)
        self.requests.abort_all(front)
        self.calls.end_all(front)

    def _status(self) -> WorkerStatus:
        pool = self.pool
        if pool.main is None:
            return WorkerStatus(failure=self.failure, pid=os.getpid())
        return WorkerStatus(
            self._target_info(),
            self.failure,
            pool.status(),
            {name: dict(counter) for name, counter in pool.counts().items()},
            pool.driver.long_jobs,
            os.getpid(),
            self.learning.report() if self.learning is not None else None,
        )

    def _target_info(self) -> TargetInfo:
        pool = self.pool
        assert pool.main is not None and pool.factory.pair is not None
        target = pool.factory.pair.target
        return TargetInfo(
            target.name or "",
            str(target.folder),
            sorted(target.stop_ids),
            engine_info(pool.main),
            pool.key,
            list(pool.factory.methods),
        )

    def _lose(self, front: Front, reason: str) -> None:
        if front.identity not in self.fronts:
            return
        log_event("front lost", logging.WARNING, reason=reason, live=len(front.requests))
        del self.fronts[front.identity]
        self.requests.abort_all(front)
        self.calls.end_all(front)
