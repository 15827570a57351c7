"""EngineLoad: closed-loop users on one engine, driven in this thread."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from peagle.bench.load.jobs import LoadJob, OnRequest
from peagle.data.bench import Task
from peagle.engine import Engine
from peagle.engine.stream import Stream
from peagle.errors import UserError
from peagle.loaded import LoadedPair
from peagle.results.request_record import RequestRecord


class EngineLoad:
    """Keeps `concurrency` users busy: steps the engine, then reads every user's new tokens."""

    def __init__(
        self,
        loaded: LoadedPair,
        engine: Engine,
        prompts: Mapping[Task, list[int]],
        concurrency: int,
        temperature: float = 0.0,
        on_request: OnRequest = lambda: None,
    ) -> None:
        """`prompts` holds the token ids of first turns, encoded before the clock starts."""
        self.loaded = loaded
        self.engine = engine
        self.prompts = prompts
        self.concurrency = concurrency
        self.temperature = temperature
        self.on_request = on_request
        self.records: list[RequestRecord] = []

    def drive(self, jobs: Sequence[LoadJob]) -> list[RequestRecord]:
        queue = iter(jobs)
        users = [
            user for _ in range(self.concurrency) if (user := self._start_job(queue)) is not None
        ]
        try:
            while users:
                self.engine.step()
                users = [
                    next_user
                    for user in users
                    if (next_user := self._advance(user, queue)) is not None
                ]
        finally:
            for user in users:  # after Ctrl-C the next run starts with an empty engine
                user.stream.abort()
        return self.records

    def _start_job(self, queue: Iterator[LoadJob]) -> "User | None":
        for job in queue:
            user = self._send(job, [])
            if user is not None:
                return user
        return None

    def _send(self, job: LoadJob, answers: list[str]) -> "User | None":
        """Send the turn after `answers`. None if the engine refuses it; the error is recorded."""
        turn = len(answers)
        prompt = self.prompts.get(job.task) if not answers else None
        record = RequestRecord(job.task.id, turn, time.perf_counter())
        self.records.append(record)
        try:
            ids = self.loaded.encode(job.messages(answers)) if prompt is None else prompt
            record.start = time.perf_counter()
            stream = self.engine.add(
                ids,
                max_tokens=job.max_tokens,
                ignore_eos=job.ignore_eos,
                temperature=self.temperature,
                seed=job.turn_seed(turn),
            )
        except UserError as error:
            record.error = str(error)
            self.on_request()
            return None
        return User(job, answers, record, stream)

    def _advance(self, user: "User", queue: Iterator[LoadJob]) -> "User | None":
        """Read the user's new tokens; after the last, send the next request if there is one."""
        try:
            user.receive(time.perf_counter())
        except UserError as error:
            user.record.error = str(error)
        if not user.stream.ended:
            return user
        self.on_request()
        answers = [*user.answers, user.record.text]
        if user.record.error is None and len(answers) < len(user.job.task.turns):
            next_turn = self._send(user.job, answers)
            if next_turn is not None:
                return next_turn
        return self._start_job(queue)


@dataclass(slots=True)
class User:
    """A user with one request under way."""

    job: LoadJob
    answers: list[str]  # to the turns before
    record: RequestRecord
    stream: Stream

    def receive(self, now: float) -> None:
        for piece in self.stream.poll():
            self.record.text += piece.text
            if piece.step is not None and piece.step.tokens:
                self.record.arrivals.append(now)
                self.record.ids += piece.step.tokens
                self.record.tokens += len(piece.step.tokens)
