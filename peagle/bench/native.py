"""The load on our own engine: one engine a method and K, kept as long as memory allows."""

import gc
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from peagle.bench.cell import Key, Run, Spec
from peagle.bench.energy import EnergyMeter
from peagle.bench.load import Job, Record, Seen, shortened
from peagle.core import Method
from peagle.engine import Engine
from peagle.engine.metrics import Metrics
from peagle.engine.stepper import Stepper, shapes_of
from peagle.engine.stream import Stream
from peagle.errors import UserError
from peagle.loaded import LoadedPair

SHARE = 0.6  # of the free memory may be taken by engines
SLACK = 64  # positions beside a request's own


class Native:
    """Runs cells. `jobs`: all that will ever be run, so that the engines are as large as they must be."""

    def __init__(
        self, loaded: LoadedPair, jobs: Sequence[Job], concurrency: int, temperature: float, exact: bool, warmup: int
    ) -> None:
        self.loaded, self.temperature, self.warmup = loaded, temperature, warmup
        self.prompts = {job.task: loaded.encode(job.messages([])) for job in jobs}
        self.pool = Pool(loaded, concurrency, *self._sizes(jobs, concurrency), exact)
        self.meter = EnergyMeter(loaded.target.device)

    def run(self, key: Key, jobs: Sequence[Job], seen: Seen) -> Run:
        engine = self.pool.engine(key.method, key.k)
        engine_metrics, device = engine.metrics, self.loaded.target.device
        Load(self, engine, key.concurrency, lambda: None).drive(shortened(jobs, key.concurrency, self.warmup))
        halves = Halves(engine.stepper)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        before, joules = Snapshot(engine_metrics), self.meter.joules()
        started = time.perf_counter()
        records = Load(self, engine, key.concurrency, seen).drive(jobs)
        ended = max((record.arrivals[-1] for record in records if record.arrivals), default=started)
        used = self.meter.joules()
        halves.close()
        steps = Snapshot(engine_metrics).minus(before)
        return Run(
            records,
            ended - started,
            spec=steps.spec if key.method != "none" else None,
            step_ms=steps.step_ms,
            drafter_share=self._share(engine, key, steps, halves),
            k_steps=steps.k_steps,
            gpu_memory_bytes=self.pool.memory(engine) if device.type == "cuda" else None,
            energy_joules=used - joules if used is not None and joules is not None else None,
        )

    def close(self) -> None:
        self.pool.close()

    def _share(self, engine: Engine, key: Key, steps: "Steps", halves: "Halves") -> float | None:
        """Of a step: acceptance and drafting."""
        if key.method == "none":
            return 0.0
        if not steps.k_steps or steps.step_ms is None:
            return None
        if not halves.on:
            most = max(steps.k_steps, key=lambda k: steps.k_steps[k])
            drafting = engine.stepper.split(key.concurrency, most)[1]
            return min(1.0, drafting / steps.step_ms) if drafting is not None else None
        return halves.second / (halves.first + halves.second) if halves.second else None

    def _sizes(self, jobs: Sequence[Job], concurrency: int) -> tuple[int, int]:
        """(the longest request, all requests under way together), in positions."""
        context = self.loaded.target.context

        def length(job: Job) -> int:
            later = sum(len(self.loaded.encode([{"role": "user", "content": turn}])) for turn in job.task.turns[1:])
            return min(context, len(self.prompts[job.task]) + later + len(job.task.turns) * job.max_tokens)

        lengths = sorted((length(job) + SLACK for job in jobs), reverse=True)
        return min(context, lengths[0]), sum(lengths[:concurrency])


class Load:
    """Keeps so many users busy. One thread: the engine steps, then whatever came is taken."""

    def __init__(self, native: Native, engine: Engine, concurrency: int, seen: Seen) -> None:
        self.native, self.engine, self.concurrency, self.seen = native, engine, concurrency, seen
        self.records: list[Record] = []

    def drive(self, jobs: Sequence[Job]) -> list[Record]:
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

    def _next(self, left: Iterator[Job]) -> "User | None":
        for job in left:
            user = self._send(job, [])
            if user is not None:
                return user
        return None

    def _send(self, job: Job, answers: list[str]) -> "User | None":
        """None: it could not be sent, which is noted."""
        native, turn = self.native, len(answers)
        prompt = native.prompts.get(job.task) if not answers else None
        record = Record(job.task.id, turn, time.perf_counter())
        self.records.append(record)
        try:
            ids = native.loaded.encode(job.messages(answers)) if prompt is None else prompt
            record.start = time.perf_counter()
            stream = self.engine.add(
                ids, max_tokens=job.max_tokens, ignore_eos=job.ignore_eos,
                temperature=native.temperature, seed=job.turn_seed(turn),
            )  # fmt: skip
        except UserError as error:
            record.error = str(error)
            self.seen()
            return None
        return User(job, answers, record, stream)

    def _look(self, user: "User", left: Iterator[Job]) -> "User | None":
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
    def __init__(self, job: Job, answers: list[str], record: Record, stream: Stream) -> None:
        self.job, self.answers, self.record, self.stream = job, answers, record, stream

    def take(self, now: float) -> None:
        for piece in self.stream.waiting():
            self.record.text += piece.text
            if piece.step is not None and piece.step.tokens:
                self.record.arrivals.append(now)
                self.record.ids += piece.step.tokens
                self.record.tokens += len(piece.step.tokens)


class Snapshot:
    """The counters of an engine at one moment."""

    def __init__(self, metrics: Metrics) -> None:
        self.spec = Spec(
            metrics.drafts, metrics.draft_tokens, metrics.accepted_tokens,
            list(metrics.drafted_at), list(metrics.accepted_at),
        )  # fmt: skip
        self.steps, self.seconds, self.k_steps = metrics.steps, metrics.step_seconds, metrics.k_steps.copy()

    def minus(self, before: "Snapshot") -> "Steps":
        return Steps(
            self.spec.minus(before.spec),
            self.steps - before.steps,
            self.seconds - before.seconds,
            dict(self.k_steps - before.k_steps),
        )


class Steps:
    def __init__(self, spec: Spec, steps: int, seconds: float, k_steps: dict[int, int]) -> None:
        self.spec, self.k_steps = spec, k_steps
        self.step_ms = 1000 * seconds / steps if steps else None


class Halves:
    """Seconds in the two halves of a step, where steps are no CUDA graphs: these replay, and are timed as such."""

    def __init__(self, stepper: Stepper) -> None:
        self.on, self.first, self.second = stepper.places.device.type == "cpu", 0.0, 0.0
        self.stepper = stepper
        if self.on:
            vars(stepper).update(
                verify=self._timed("first", stepper.verify), settle=self._timed("second", stepper.settle)
            )

    def _timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return work(*args)
            finally:
                setattr(self, name, getattr(self, name) + time.perf_counter() - started)

        return run

    def close(self) -> None:
        if self.on:
            del self.stepper.verify, self.stepper.settle  # the class's own again


class Pool:
    """Engines by method and K; the one not used for longest goes when the next does not fit beside it."""

    def __init__(self, loaded: LoadedPair, batch: int, longest: int, tokens: int, exact: bool) -> None:
        self.loaded, self.batch, self.longest, self.exact = loaded, batch, longest, exact
        self.tokens = tokens
        self.engines: OrderedDict[tuple[str, int | str], Engine] = OrderedDict()
        self.bytes: dict[tuple[str, int | str], int] = {}
        self.budget = int(SHARE * free_memory(loaded.target.device))

    def engine(self, method: str, k: int | str) -> Engine:
        name = (method, k)
        if name not in self.engines:
            self._make_room(self._estimate(method))
            before = allocated(self.loaded.target.device)
            self.engines[name] = engine = self._build(method, k)
            engine.warm_up()
            taken = allocated(self.loaded.target.device) - before
            self.bytes[name] = taken or self._estimate(method)
        self.engines.move_to_end(name)
        return self.engines[name]

    def memory(self, engine: Engine) -> int:
        """The most that was allocated, without the engines that wait their turn."""
        others = sum(self.bytes[name] for name, one in self.engines.items() if one is not engine)
        return int(torch.cuda.max_memory_allocated(self.loaded.target.device)) - others

    def close(self) -> None:
        self._make_room(self.budget)

    def _build(self, method: str, k: int | str) -> Engine:
        each = self._each(method)
        tokens = max(self.longest + SLACK, min(self.tokens, self.budget // each))
        slack = 2 * k if isinstance(k, int) else SLACK
        return Engine(
            self.loaded, method=method, k=k or "auto", max_batch=self.batch,
            context=min(self.loaded.target.context, self.longest + slack), tokens=tokens,
            max_queue=max(1024, self.batch), exact=self.exact, prefix_caching=False, thread=False,
        )  # fmt: skip

    def _each(self, method: str) -> int:
        """Bytes of a position."""
        chosen: Method | None = None if method == "none" else method  # type: ignore[assignment]
        drafter = None if chosen is None else self.loaded.drafter(chosen)
        return sum(shape.bytes for shape in shapes_of(self.loaded.target, drafter))

    def _estimate(self, method: str) -> int:
        """Keys and values; on a CPU in half precision also the matrices, laid out anew (engine/weight.py)."""
        target = self.loaded.target
        copied = target.device.type == "cpu" and target.dtype != torch.float32
        weights = sum(p.numel() * p.element_size() for p in target.model.parameters()) if copied else 0
        return min(self.tokens * self._each(method), self.budget) + weights

    def _make_room(self, needed: int) -> None:
        while self.engines and sum(self.bytes.values()) + needed > self.budget:
            name, engine = self.engines.popitem(last=False)
            del self.bytes[name]
            engine.close()
            del engine
            gc.collect()
            if self.loaded.target.device.type == "cuda":
                torch.cuda.empty_cache()


def allocated(device: torch.device) -> int:
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 8 << 30
