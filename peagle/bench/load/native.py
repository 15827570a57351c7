"""The load on our own engine, driven in this thread: it steps, then whatever came is taken."""

import time
from collections.abc import Iterator, Sequence

import torch

from peagle.bench.load.energy import EnergyMeter
from peagle.bench.load.engine_pool import SLACK, EnginePool
from peagle.bench.load.jobs import LoadJob, RequestRecord, Seen, shortened
from peagle.bench.load.step_timings import CounterSnapshot, Steps, StepTimings
from peagle.engine import Engine
from peagle.engine.stream import Stream
from peagle.errors import UserError
from peagle.loaded import LoadedPair
from peagle.results.cell import CellKey, CellRun


class NativeRunner:
    """Runs cells. `jobs`: all that will ever be run, so that the engines are as large as they must be."""

    def __init__(
        self,
        loaded: LoadedPair,
        jobs: Sequence[LoadJob],
        concurrency: int,
        temperature: float,
        exact: bool,
        warmup: int,
    ) -> None:
        self.loaded, self.temperature, self.warmup = loaded, temperature, warmup
        self.prompts = {job.task: loaded.encode(job.messages([])) for job in jobs}
        self.pool = EnginePool(loaded, concurrency, *self._sizes(jobs, concurrency), exact)
        self.meter = EnergyMeter(loaded.target.device)

    def run(self, key: CellKey, jobs: Sequence[LoadJob], seen: Seen) -> CellRun:
        engine = self.pool.engine(key.method, key.k, key.tree)
        engine_metrics, device = engine.metrics, self.loaded.target.device
        EngineLoad(self, engine, key.concurrency, lambda: None).drive(
            shortened(jobs, key.concurrency, self.warmup)
        )
        timings = StepTimings()
        engine.on_step(timings.add)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        before, joules = CounterSnapshot(engine_metrics), self.meter.joules()
        started = time.perf_counter()
        records = EngineLoad(self, engine, key.concurrency, seen).drive(jobs)
        ended = max((record.arrivals[-1] for record in records if record.arrivals), default=started)
        used = self.meter.joules()
        engine.on_step(None)
        steps = CounterSnapshot(engine_metrics).minus(before)
        return CellRun(
            records,
            ended - started,
            spec=steps.spec if key.method != "none" else None,
            step_ms=steps.step_ms,
            drafter_share=self._share(engine, key, steps, timings),
            k_steps=steps.k_steps,
            gpu_memory_bytes=self.pool.memory(engine) if device.type == "cuda" else None,
            energy_joules=used - joules if used is not None and joules is not None else None,
        )

    def close(self) -> None:
        self.pool.close()

    def _share(
        self, engine: Engine, key: CellKey, steps: Steps, timings: StepTimings
    ) -> float | None:
        """Of a step: acceptance and drafting."""
        if key.method == "none":
            return 0.0
        if not steps.k_steps or steps.step_ms is None:
            return None
        if self.loaded.target.device.type == "cuda":
            most = max(steps.k_steps, key=lambda k: steps.k_steps[k])
            drafting = engine.time_step(key.concurrency, engine.shape(most))[1]
            return min(1.0, drafting / steps.step_ms) if drafting is not None else None
        return timings.draft_share

    def _sizes(self, jobs: Sequence[LoadJob], concurrency: int) -> tuple[int, int]:
        """(the longest request, all requests under way together), in positions."""
        context = self.loaded.target.context

        def length(job: LoadJob) -> int:
            later = sum(
                len(self.loaded.encode([{"role": "user", "content": turn}]))
                for turn in job.task.turns[1:]
            )
            return min(
                context, len(self.prompts[job.task]) + later + len(job.task.turns) * job.max_tokens
            )

        lengths = sorted((length(job) + SLACK for job in jobs), reverse=True)
        return min(context, lengths[0]), sum(lengths[:concurrency])


class EngineLoad:
    """Keeps so many users busy. One thread: the engine steps, then whatever came is taken."""

    def __init__(self, native: NativeRunner, engine: Engine, concurrency: int, seen: Seen) -> None:
        self.native, self.engine, self.concurrency, self.seen = native, engine, concurrency, seen
        self.records: list[RequestRecord] = []

    def drive(self, jobs: Sequence[LoadJob]) -> list[RequestRecord]:
        left = iter(jobs)
        users = [user for _ in range(self.concurrency) if (user := self._next(left)) is not None]
        try:
            while users:
                self.engine.step()
                users = [after for user in users if (after := self._look(user, left)) is not None]
        finally:
            for user in users:  # Ctrl-C: the next run begins with nothing under way
                user.stream.abort()
        return self.records

    def _next(self, left: Iterator[LoadJob]) -> "User | None":
        for job in left:
            user = self._send(job, [])
            if user is not None:
                return user
        return None

    def _send(self, job: LoadJob, answers: list[str]) -> "User | None":
        """None: it could not be sent, which is noted."""
        native, turn = self.native, len(answers)
        prompt = native.prompts.get(job.task) if not answers else None
        record = RequestRecord(job.task.id, turn, time.perf_counter())
        self.records.append(record)
        try:
            ids = native.loaded.encode(job.messages(answers)) if prompt is None else prompt
            record.start = time.perf_counter()
            stream = self.engine.add(
                ids,
                max_tokens=job.max_tokens,
                ignore_eos=job.ignore_eos,
                temperature=native.temperature,
                seed=job.turn_seed(turn),
            )
        except UserError as error:
            record.error = str(error)
            self.seen()
            return None
        return User(job, answers, record, stream)

    def _look(self, user: "User", left: Iterator[LoadJob]) -> "User | None":
        """The user, with a new request if the old one has ended; None if there is nothing left to ask."""
        try:
            user.take(time.perf_counter())
        except UserError as error:
            user.record.error = str(error)
        if not user.stream.ended:
            return user
        self.seen()
        answers = [*user.answers, user.record.text]
        if user.record.error is None and len(answers) < len(user.job.task.turns):
            after = self._send(user.job, answers)
            if after is not None:
                return after
        return self._next(left)


class User:
    def __init__(
        self, job: LoadJob, answers: list[str], record: RequestRecord, stream: Stream
    ) -> None:
        self.job, self.answers, self.record, self.stream = job, answers, record, stream

    def take(self, now: float) -> None:
        for piece in self.stream.poll():
            self.record.text += piece.text
            if piece.step is not None and piece.step.tokens:
                self.record.arrivals.append(now)
                self.record.ids += piece.step.tokens
                self.record.tokens += len(piece.step.tokens)
