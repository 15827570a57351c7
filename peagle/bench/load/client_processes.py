"""ClientProcesses: the users of a load, spread evenly over processes.

    parent                      client process (one of N)
    prepare: ClientLoad    ->   warm up
                           <-   READY          the parent waits for all of them: a barrier
    run: START             ->   send the load
                           <-   ANSWERED       after every request
                           <-   ClientRecords

All users take their jobs from one shared queue, as the users of a single process do. Times are
those of the system-wide monotonic clock, so the records of all processes are merged as they are.
"""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from peagle.bench.load.endpoint_client import EndpointClient
from peagle.bench.load.jobs import LoadJob, OnRequest
from peagle.errors import UserError
from peagle.results.request_record import RequestRecord

READY = "ready"
START = "start"
ANSWERED = "answered"
KILL_SECONDS = 5.0  # for a killed process to be gone


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """The share of one process: its users; the queue of `jobs` is shared by all processes."""

    users: int
    warmup: Sequence[LoadJob]
    jobs: Sequence[LoadJob]


@dataclass(frozen=True, slots=True)
class ClientRecords:
    records: list[RequestRecord]
    uncounted_answers: int


class ClientProcesses:
    def __init__(self, client: EndpointClient, count: int) -> None:
        self.client = client
        context = multiprocessing.get_context("spawn")
        self.next_job = context.Value("q", 0)
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        self.active: list[Connection] = []  # those with users in the current run
        with blocked_interrupts():
            for number in range(count):
                here, there = context.Pipe()
                process = context.Process(
                    target=run_client,
                    args=(there, client, self.next_job),
                    name=f"client {number + 1} of {count}",
                    daemon=True,
                )
                process.start()
                there.close()  # the end of the process is then the end of the pipe
                self.connections.append(here)
                self.processes.append(process)

    def prepare(self, users: int, warmup: Sequence[LoadJob], jobs: Sequence[LoadJob]) -> None:
        """Deal the users, and return when every process has warmed up."""
        shares = deal_users(min(users, len(jobs)), len(self.connections))
        self.active = self.connections[: len(shares)]
        self.next_job.value = 0
        for number, (connection, share) in enumerate(zip(self.active, shares, strict=True)):
            load = ClientLoad(share, warmup[number :: len(shares)], jobs)
            self._send(connection, load)
        for connection in self.active:
            self._receive(connection)

    def run(self, on_request: OnRequest) -> list[RequestRecord]:
        """Start all prepared processes together; the records are in the order of their start."""
        for connection in self.active:
            self._send(connection, START)
        parts: list[ClientRecords] = []
        running = list(self.active)
        while running:
            for ready in wait(running):
                assert isinstance(ready, Connection)
                message = self._receive(ready)
                if message == ANSWERED:
                    on_request()
                    continue
                parts.append(message)
                running.remove(ready)
        self.client.uncounted_answers += sum(part.uncounted_answers for part in parts)
        return merge_records(parts)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(KILL_SECONDS)
        for connection in self.connections:
            connection.close()

    def _send(self, connection: Connection, message: object) -> None:
        try:
            connection.send(message)
        except OSError as error:
            raise self._death(connection) from error

    def _receive(self, connection: Connection) -> Any:
        try:
            message = connection.recv()
        except (EOFError, OSError) as error:
            raise self._death(connection) from error
        if isinstance(message, UserError):
            raise message
        return message

    def _death(self, connection: Connection) -> UserError:
        process = self.processes[self.connections.index(connection)]
        process.join(KILL_SECONDS)
        return UserError(
            f"{process.name} (process {process.pid}) {exit_reason(process.exitcode)}:"
            " the finished runs are kept, so repeat the command; use fewer `clients` if memory"
            " ran out"
        )


def merge_records(parts: Sequence[ClientRecords]) -> list[RequestRecord]:
    """All requests in the order of their start: percentiles are those of all of them."""
    records = [record for part in parts for record in part.records]
    return sorted(records, key=lambda record: record.start)


def deal_users(users: int, clients: int) -> list[int]:
    """Users of each process, which differ by at most one: 7 users, 3 clients -> [3, 2, 2]."""
    active = min(users, clients)
    return [users // active + (number < users % active) for number in range(active)]


def exit_reason(code: int | None) -> str:
    """
    >>> exit_reason(-9)
    'was killed by SIGKILL'
    """
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code is not None else "closed its connection"


@contextmanager
def blocked_interrupts() -> Iterator[None]:
    """Processes started here never see Ctrl-C: the parent gets it, and ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_client(connection: Connection, client: EndpointClient, next_job: Any) -> None:
    """The main function of a client process; it ends with the connection to the parent."""
    try:
        while True:
            load = connection.recv()
            connection.send(asyncio.run(send_load(connection, client, next_job, load)))
    except UserError as error:
        connection.send(error)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the parent has ended


async def send_load(
    connection: Connection, client: EndpointClient, next_job: Any, load: ClientLoad
) -> ClientRecords:
    async with client.connect(load.users) as connections:
        warmup_users = min(load.users, len(load.warmup))
        await client.drive(connections, iter(load.warmup), warmup_users)
        client.uncounted_answers = 0
        connection.send(READY)
        assert connection.recv() == START
        queue = shared_queue(load.jobs, next_job)
        records = await client.drive(
            connections, queue, load.users, lambda: connection.send(ANSWERED)
        )
    return ClientRecords(records, client.uncounted_answers)


def shared_queue(jobs: Sequence[LoadJob], next_job: Any) -> Iterator[LoadJob]:
    """Each job goes to the one process that takes it; `next_job` is their common counter."""
    while True:
        with next_job.get_lock():
            index = next_job.value
            next_job.value += 1
        if index >= len(jobs):
            return
        yield jobs[index]
