"""GrammarQueue: checks the grammars of requests, a few at a time, with users taking turns.

    waiting -> probe (a process that can be killed) -> cached -> the engine's process compiles it

Only what the probe has accepted, within its limits of time, memory and stack, is compiled where
its masks are computed. Requests with the same grammar share one job, which is canceled when the
last of their clients has left.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from peagle.errors import UserError
from peagle.grammar import Grammar
from peagle.grammar.probe import GrammarProbe, ProbeDied
from peagle.grammar.probe_report import ProbeReport
from peagle.server.front.probed_grammars import ProbedGrammars
from peagle.server.http.errors import ApiError
from peagle.server.http.logs import log_event
from peagle.server.messages import ProbedGrammar
from peagle.server.worker.requests import MAX_GRAMMAR_BYTES

T = TypeVar("T")
MAX_RUNNING = 2
# The limit of CPU time in the probe is lower, and counts unless the machine is overloaded.
PROBE_SECONDS = 10.0
# A probe that has run for so long is ended when another grammar waits or the server stops.
CONTENDED_SECONDS = 1.5
WAIT_SECONDS = 10.0
POLL_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class GrammarJob:
    compiler: ProbedGrammars
    grammar: Grammar
    user: str
    turn: "asyncio.Future[None]"
    task: "asyncio.Task[ProbedGrammar]" = field(init=False)
    clients: int = 0


class GrammarQueue:
    """All methods must be called on the event loop."""

    def __init__(self, max_waiting: int) -> None:
        """`max_waiting` grammars may wait, and one user's may take half of the places."""
        self.max_waiting = max_waiting
        # Raises an error when the server shuts down; set by the backend.
        self.check_accepting: Callable[[], None] = lambda: None
        # Some threads remain for short work while others compile.
        self._threads = ThreadPoolExecutor(MAX_RUNNING + 2, "peagle-grammar")
        self._probe: GrammarProbe | None = None
        self._jobs: dict[Grammar, GrammarJob] = {}
        # Waiting jobs by user, never empty; the first user's turn is next.
        self._waiting: dict[str, deque[GrammarJob]] = {}
        self.running = 0
        self._started = asyncio.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """Run something short and bounded, which is too long for the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def compile(self, compiler: ProbedGrammars, grammar: Grammar, user: str) -> ProbedGrammar:
        """The checked grammar; UserError: it cannot be used, ApiError: try again later."""
        compiled = compiler.cached(grammar)
        if compiled is not None:
            return compiled
        job = self._jobs.get(grammar) or self._add_job(compiler, grammar, user)
        job.clients += 1
        try:
            return await asyncio.shield(job.task)
        finally:
            job.clients -= 1
            if not job.clients:
                self._forget(job)
                job.task.cancel()

    def close(self) -> None:
        for job in list(self._jobs.values()):
            job.task.cancel()
        if self._probe is not None:
            self._probe.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- turns ------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _add_job(self, compiler: ProbedGrammars, grammar: Grammar, user: str) -> GrammarJob:
        own = len(self._waiting.get(user, ()))
        if self.waiting >= self.max_waiting or own >= max(self.max_waiting // 2, 1):
            message = f"{self.waiting} grammars are waiting to be compiled: try again later"
            raise ApiError(429, message, retry_after=1)
        loop = asyncio.get_running_loop()
        job = GrammarJob(compiler, grammar, user, loop.create_future())
        job.task = loop.create_task(self._run_job(job))
        # An error that comes after all clients have left is nobody's.
        job.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._jobs[grammar] = job
        self._waiting.setdefault(user, deque()).append(job)
        self._start_next()
        return job

    def _start_next(self) -> None:
        """Give free turns to waiting jobs."""
        while self.running < MAX_RUNNING and self._waiting:
            user = next(iter(self._waiting))
            queue = self._waiting.pop(user)
            queue.popleft().turn.set_result(None)
            if queue:
                self._waiting[user] = queue  # Behind the other users.
            self.running += 1

    def _leave(self, job: GrammarJob) -> None:
        """Give back the turn of a job, or its place in the queue."""
        self._forget(job)
        queue = self._waiting.get(job.user)
        if queue is not None and job in queue:
            queue.remove(job)
            if not queue:
                del self._waiting[job.user]
        elif job.turn.done():
            self.running -= 1
        self._start_next()

    def _forget(self, job: GrammarJob) -> None:
        """From now on, a request with the same grammar gets a new job."""
        if self._jobs.get(job.grammar) is job:
            del self._jobs[job.grammar]

    # --- one job ----------------------------------------------------------------------------------

    async def _run_job(self, job: GrammarJob) -> ProbedGrammar:
        try:
            await self._wait_for_turn(job)
            report = await self._try(job)
            if report.problem:
                raise UserError(report.problem)
            return remember(job, report)
        except ProbeDied as error:
            log_event("grammar process ended", reason=str(error))
            raise ApiError(503, f"{error}: try again", retry_after=1) from error
        finally:
            self._leave(job)

    async def _wait_for_turn(self, job: GrammarJob) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WAIT_SECONDS
        while not job.turn.done():
            self.check_accepting()
            if loop.time() > deadline:
                message = "too many grammars are waiting to be compiled: try again later"
                raise ApiError(429, message, retry_after=5)
            await asyncio.wait({job.turn}, timeout=POLL_SECONDS)

    async def _try(self, job: GrammarJob) -> ProbeReport:
        probe = await self._ready_probe(job.compiler)
        submitted = asyncio.ensure_future(self.run(lambda: probe.submit(job.grammar)))
        try:
            report = asyncio.wrap_future(await asyncio.shield(submitted))
        except asyncio.CancelledError:
            submitted.add_done_callback(cancel_report)
            raise
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            while not report.done():
                await asyncio.wait({report}, timeout=POLL_SECONDS)
                if not report.done():
                    self._check_seconds(loop.time() - started)
            return report.result()
        finally:
            report.cancel()  # Without effect on a report that has arrived.

    def _check_seconds(self, seconds: float) -> None:
        """End a probe that takes too long."""
        if seconds > PROBE_SECONDS:
            raise UserError(
                f"the grammar was not compiled within {PROBE_SECONDS:g} seconds: make it smaller"
            )
        if seconds > CONTENDED_SECONDS:
            self.check_accepting()
        if seconds > CONTENDED_SECONDS and self._waiting:
            raise ApiError(
                429,
                f"the grammar was not compiled within {CONTENDED_SECONDS:g} seconds, and others"
                " are waiting: make it smaller, or try again later",
                retry_after=5,
            )

    async def _ready_probe(self, compiler: ProbedGrammars) -> GrammarProbe:
        """The probe; the first grammar waits until the vocabulary is read, here and there."""
        async with self._started:
            if self._probe is None:
                vocabulary = await self.run(lambda: compiler.vocabulary)
                self._probe = GrammarProbe(vocabulary)
            return self._probe


def remember(job: GrammarJob, report: ProbeReport) -> ProbedGrammar:
    """Keep what the probe has accepted. The engine's process counts all compiled grammars."""
    if report.memory_bytes > MAX_GRAMMAR_BYTES:
        raise ApiError(
            429,
            "the grammars of running requests occupy too much memory: try again later",
            retry_after=5,
        )
    grammar = Grammar("lark", report.lark) if report.lark else job.grammar
    return job.compiler.add(job.grammar, grammar, report.memory_bytes)


def cancel_report(submitted: "asyncio.Future[Future[ProbeReport]]") -> None:
    if not submitted.cancelled() and submitted.exception() is None:
        submitted.result().cancel()
