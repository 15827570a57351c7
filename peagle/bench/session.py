"""A run from its settings to its file: cells in turn, what is there already skipped; then the check and the scores."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from peagle.bench.load.jobs import LoadJob, RequestRecord, Seen
from peagle.bench.order import Turn, order_of
from peagle.bench.quality.output_check import Margin, baseline, check, no_margin
from peagle.bench.results import Results, key_of
from peagle.bench.settings import BenchSettings
from peagle.results.cell import CellKey, CellRun

Jobs = Mapping[str, Sequence[LoadJob]]


class Runner(Protocol):
    """Our engine, or an endpoint."""

    def run(self, key: CellKey, jobs: Sequence[LoadJob], seen: Seen) -> CellRun: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Watch:
    """Whoever looks on: told what runs now, every request, and every cell."""

    begins: Callable[[str], None] = lambda what: None
    seen: Seen = lambda: None
    measured: Callable[[dict[str, Any]], None] = lambda cell: None


@dataclass(slots=True)
class Session:
    settings: BenchSettings
    jobs: Jobs
    results: Results
    watch: Watch = field(default_factory=Watch)

    @property
    def left(self) -> list[Turn]:
        turns = order_of(self.settings.keys, self.settings.repeats, self.settings.seed)
        return [turn for turn in turns if self.results.done(turn.key) <= turn.repeat]

    def requests(self, turns: Sequence[Turn]) -> int:
        """How many will be sent, at most."""
        return sum(len(job.task.turns) for turn in turns for job in self.jobs[turn.key.set])

    def measure(self, runner: Runner) -> None:
        left = self.left
        for number, (repeat, key) in enumerate(left, start=1):
            self.watch.begins(
                f"{number}/{len(left)} {key}, run {repeat + 1} of {self.settings.repeats}"
            )
            run = runner.run(key, self.jobs[key.set], self.watch.seen)
            self.watch.measured(self.results.add(key, run))
        self.results.settle(self.settings.keys)

    def check(
        self,
        margins: Callable[[str], Margin] | None = None,
        base: Mapping[CellKey, list[RequestRecord]] | None = None,
    ) -> None:
        """Fills `check` of every cell that drafts; nothing to compare where answers are sampled.

        `margins`: a set's name -> who tells margins; `base`: another run's answers to compare with.
        """
        if not self.settings.greedy:
            return
        answers = self.results.answers()
        for cell in self.results.cells:
            key = key_of(cell)
            known = baseline(key, {**(base or {}), **answers})
            if key.method == "none" or known is None or key not in answers:
                continue
            self.watch.begins(f"checking {key}")
            cell["check"] = check(answers[key], known, margins(key.set) if margins else no_margin)
        self.results.write()

    def score(self) -> None:
        from peagle.bench.quality.scoring import scores

        tasks = {name: [job.task for job in jobs] for name, jobs in self.jobs.items()}
        self.watch.begins("scoring")
        self.results.content["scores"] = scores(self.results.answers(), tasks)
        self.results.write()


def digest(jobs: Sequence[LoadJob]) -> str:
    """Of what is asked: the same data set in another folder is the same."""
    told = [[list(job.task.turns), job.task.system, job.max_tokens] for job in jobs]
    return f"{len(jobs)} {hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]}"


def all_failed(cells: Sequence[Mapping[str, Any]]) -> str | None:
    """The first error, if not one request was answered."""
    if not cells or any(
        any(cell["output_throughput_runs"]) or not cell["failed"] for cell in cells
    ):
        return None
    return str(cells[0]["first_error"])
