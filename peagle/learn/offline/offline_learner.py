"""Learning without a server: from logs to a better drafter, in this process."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from peagle.data.records import Report, ignore
from peagle.errors import UserError
from peagle.learn.file_lock import try_lock
from peagle.learn.folder import LearnFolder
from peagle.learn.offline.log_import import ImportCounts, LogImport
from peagle.learn.settings import LearnerSettings
from peagle.learn.train_job import TrainJob
from peagle.learn.training.new_documents import DocumentCounter
from peagle.learn.training.round_settings import RoundSettings, read_round_settings
from peagle.learn.training.training_round import StepCallback
from peagle.learn.versions import VersionRecord

MAX_TOKENS = 1 << 40  # A log is trained on as a whole.


@dataclass(frozen=True, slots=True)
class OfflineOptions:
    """What replaces the settings of a round; None: as they are."""

    epochs: float | None = None
    lr: float | None = None

    def apply(self, settings: RoundSettings) -> RoundSettings:
        return replace(
            settings,
            min_documents=1,
            max_tokens=MAX_TOKENS,
            epochs=self.epochs or settings.epochs,
            lr=self.lr or settings.lr,
        )


class OfflineLearner:
    def __init__(self, root: Path, settings: LearnerSettings, options: OfflineOptions) -> None:
        self.folder = LearnFolder(root)
        # Nothing else runs: the job need not share the device.
        self.job = TrainJob(self.folder, replace(settings, time_share=0.0))
        self.job.round_settings = options.apply(read_round_settings(self.folder))
        lock = try_lock(self.folder.learner_lock)
        if lock is None:
            raise UserError(f"another process learns in {root}: end it, or give another folder")
        self._lock = lock

    def close(self) -> None:
        """Let other processes learn in the folder."""
        os.close(self._lock)

    def import_logs(
        self,
        logs: Sequence[Path],
        report: Report = ignore,
        progress: Callable[[int], None] = lambda _: None,
    ) -> ImportCounts:
        reader = LogImport(self.folder, self.job.teacher.target, report)
        reader.read(logs, progress)
        return reader.counts

    def learn(self, on_step: StepCallback = lambda *_: None) -> VersionRecord | None:
        """Run one round, or resume it; None: it was interrupted."""
        plan = self.job.next_plan()
        if plan is None:
            counter = DocumentCounter(self.folder)
            counter.update()
            if not counter.new:
                raise UserError(f"{self.folder.root} has learned from all its documents already")
            raise UserError(
                f"only {counter.held_back} answers are held back to judge the drafter,"
                f" {self.job.round_settings.min_held_back} are needed: give a longer log (every"
                " fifth prompt is held back)"
            )
        self.job.on_step = on_step
        return self.job.run_round(plan)
