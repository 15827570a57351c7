"""Session: measures the missing cells of a run, then checks and scores the answers."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from peagle.bench.load.jobs import LoadJob, OnRequest
from peagle.bench.order import ScheduledRun, schedule_runs
from peagle.bench.quality.output_check import Margin, baseline_key, check_answers, no_margin
from peagle.bench.settings import BenchSettings
from peagle.data.bench import Task
from peagle.results.answers import Answers
from peagle.results.cell import BenchCell
from peagle.results.cell_run import CellRun
from peagle.results.key import CellKey
from peagle.results.writer import ResultWriter

Jobs = Mapping[str, Sequence[LoadJob]]  # by set


class Runner(Protocol):
    """Runs the jobs of a cell: on peagle's engine, or on an endpoint."""

    def run(self, key: CellKey, jobs: Sequence[LoadJob], on_request: OnRequest) -> CellRun: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class SessionCallbacks:
    """What a progress display is called with."""

    on_start: Callable[[str], None] = lambda activity: None
    on_request: OnRequest = lambda: None
    on_cell: Callable[[BenchCell], None] = lambda cell: None


@dataclass(slots=True)
class Session:
    settings: BenchSettings
    jobs: Jobs
    writer: ResultWriter
    callbacks: SessionCallbacks = field(default_factory=SessionCallbacks)

    @property
    def pending(self) -> list[ScheduledRun]:
        schedule = schedule_runs(self.settings.keys, self.settings.repeats, self.settings.seed)
        return [run for run in schedule if self.writer.finished_runs(run.key) <= run.repeat]

    def max_requests(self, schedule: Sequence[ScheduledRun]) -> int:
        """The number of requests these runs send, unless turns fail."""
        return sum(len(job.task.turns) for run in schedule for job in self.jobs[run.key.set])

    def measure(self, runner: Runner) -> None:
        pending = self.pending
        for number, (repeat, key) in enumerate(pending, start=1):
            self.callbacks.on_start(
                f"{number}/{len(pending)} {key}, run {repeat + 1} of {self.settings.repeats}"
            )
            run = runner.run(key, self.jobs[key.set], self.callbacks.on_request)
            self.callbacks.on_cell(self.writer.add(key, run))
        self.writer.sort_cells(self.settings.keys)

    def check(
        self,
        margins: Mapping[str, Margin] | None = None,
        other_answers: Answers | None = None,
    ) -> None:
        """Compare the answers of every cell with those of plain decoding.

        `margins` by set; `other_answers` are those of another run, for a run without `none`.
        Sampled answers are compared for peagle's own engine, where a seed decides them.
        """
        if not self.settings.greedy and self.writer.result.info.engine != "native":
            return
        answers = self.writer.answers()
        plain_answers = {**(other_answers or {}), **answers}
        for cell in self.writer.cells:
            key = cell.key
            plain = baseline_key(key.set, plain_answers)
            if plain is None or key == plain or key not in answers:
                continue
            self.callbacks.on_start(f"checking {key}")
            margin = margins[key.set] if margins and self.settings.greedy else no_margin
            check = check_answers(answers[key], plain_answers[plain], margin)
            self.writer.set_check(key, replace(check, baseline_concurrency=plain.concurrency))
        self.writer.write()

    @property
    def tasks(self) -> dict[str, list[Task]]:
        return {name: [job.task for job in jobs] for name, jobs in self.jobs.items()}

    def require_scoring(self) -> None:
        """Raises UserError if score() would, before hours are spent on the measurement."""
        from peagle.bench.quality.scoring import require_scoring

        require_scoring(self.tasks)

    def score(self) -> None:
        from peagle.bench.quality.scoring import score_answers

        self.callbacks.on_start("scoring")
        self.writer.set_scores(score_answers(self.writer.answers(), self.tasks))
        self.writer.write()


def jobs_digest(jobs: Sequence[LoadJob]) -> str:
    """A digest of the prompts, the same for the same data set in another folder."""
    prompts = [[list(job.task.turns), job.task.system, job.max_tokens] for job in jobs]
    return f"{len(jobs)} {hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:12]}"


def common_error(cells: Sequence[BenchCell]) -> str | None:
    """The first error, if not a single request was answered."""
    if not cells or not all(cell.all_failed for cell in cells):
        return None
    return str(cells[0].first_error)
