"""NativeRunner: runs cells on peagle's own engine."""

import time
from collections.abc import Sequence

import torch

from peagle.bench.load.energy import EnergyMeter
from peagle.bench.load.engine_load import EngineLoad
from peagle.bench.load.engine_pool import EXTRA_POSITIONS, EnginePool
from peagle.bench.load.jobs import LoadJob, OnRequest, warmup_jobs
from peagle.bench.load.step_timings import CounterSnapshot, StepCounters, StepTimings
from peagle.engine import Engine
from peagle.loaded import LoadedPair
from peagle.results.cell_run import CellRun
from peagle.results.key import CellKey


class NativeRunner:
    def __init__(
        self,
        loaded: LoadedPair,
        jobs: Sequence[LoadJob],
        concurrency: int,
        temperature: float,
        exact: bool | None,
        warmup: int,
        ngram: bool | None = None,
    ) -> None:
        """`jobs` are all that will be run, `concurrency` is the maximum: they size the engines."""
        self.loaded = loaded
        self.temperature = temperature
        self.warmup = warmup
        self.prompts = {job.task: loaded.encode(job.messages([])) for job in jobs}
        max_length, kv_tokens = self._size(jobs, concurrency)
        self.pool = EnginePool(loaded, concurrency, max_length, kv_tokens, exact, ngram)
        self.meter = EnergyMeter(loaded.target.device)

    def run(self, key: CellKey, jobs: Sequence[LoadJob], on_request: OnRequest) -> CellRun:
        engine = self.pool.engine(key.method, key.k, key.tree)
        device = self.loaded.target.device
        self._load(engine, key.concurrency).drive(warmup_jobs(jobs, key.concurrency, self.warmup))
        timings = StepTimings()
        engine.on_step(timings.add)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        before = CounterSnapshot(engine.metrics)
        joules_before = self.meter.joules()
        start = time.perf_counter()
        records = self._load(engine, key.concurrency, on_request).drive(jobs)
        end = max((record.arrivals[-1] for record in records if record.arrivals), default=start)
        joules_after = self.meter.joules()
        engine.on_step(None)
        steps = CounterSnapshot(engine.metrics).minus(before)
        energy = None
        if joules_before is not None and joules_after is not None:
            energy = joules_after - joules_before
        return CellRun(
            records,
            end - start,
            spec=steps.spec if key.method != "none" else None,
            step_ms=steps.step_ms,
            drafter_share=self._drafter_share(engine, key, steps, timings),
            k_steps=steps.k_steps,
            gpu_memory_bytes=self.pool.peak_memory(engine) if device.type == "cuda" else None,
            energy_joules=energy,
            exact_mode=engine.exact_mode or "off",
        )

    def close(self) -> None:
        self.pool.close()

    def _load(
        self, engine: Engine, concurrency: int, on_request: OnRequest = lambda: None
    ) -> EngineLoad:
        return EngineLoad(
            self.loaded, engine, self.prompts, concurrency, self.temperature, on_request
        )

    def _drafter_share(
        self, engine: Engine, key: CellKey, steps: StepCounters, timings: StepTimings
    ) -> float | None:
        """The share of a step's time that acceptance and drafting take."""
        if key.method == "none":
            return 0.0
        if not steps.k_steps or steps.step_ms is None:
            return None
        if self.loaded.target.device.type != "cuda":
            return timings.draft_share
        usual_nodes = max(steps.k_steps, key=lambda k: steps.k_steps[k])
        _, draft_ms = engine.time_step(key.concurrency, engine.shape(usual_nodes))
        return min(1.0, draft_ms / steps.step_ms) if draft_ms is not None else None

    def _size(self, jobs: Sequence[LoadJob], concurrency: int) -> tuple[int, int]:
        """Positions of the longest request, and of the largest batch."""
        context = self.loaded.target.context

        def length(job: LoadJob) -> int:
            later_turns = sum(
                len(self.loaded.encode([{"role": "user", "content": turn}]))
                for turn in job.task.turns[1:]
            )
            answers = len(job.task.turns) * job.max_tokens
            return min(context, len(self.prompts[job.task]) + later_turns + answers)

        lengths = sorted((length(job) + EXTRA_POSITIONS for job in jobs), reverse=True)
        return min(context, lengths[0]), sum(lengths[:concurrency])
