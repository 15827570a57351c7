"""The job that trains: `python -m peagle.learn.train_job DIR SETTINGS_JSON`.

It runs rounds as long as enough new documents are there, and promotes the winners. A killed job
resumes its round. SIGTERM ends it after the current step, with its state saved.
"""

import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from peagle.errors import UserError
from peagle.learn.events import append_event
from peagle.learn.folder import LearnFolder
from peagle.learn.promotion import promote_candidates
from peagle.learn.settings import LearnerSettings, learner_settings_from_json
from peagle.learn.status import TrainerStatus, write_status
from peagle.learn.training.judge import AcceptedCounts
from peagle.learn.training.new_documents import DocumentCounter
from peagle.learn.training.round_folder import RoundFolder, RoundPlan
from peagle.learn.training.round_settings import RoundSettings, read_round_settings
from peagle.learn.training.teacher import Teacher, load_teacher
from peagle.learn.training.training_round import (
    StepCallback,
    TrainingRound,
    document_length,
)
from peagle.learn.versions import VersionRecord, check_base, read_current
from peagle.train.trainer import NonFiniteLoss

FAILED_EXIT_CODE = 2


class TrainJob:
    def __init__(
        self,
        folder: LearnFolder,
        settings: LearnerSettings,
        on_step: StepCallback = lambda *_: None,
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.on_step = on_step
        self.rounds = RoundFolder(folder)
        self.round_settings: RoundSettings = read_round_settings(folder)
        self.teacher: Teacher = load_teacher(settings)
        folder.open(self.teacher.identity)
        check_base(folder, self.teacher.base)
        self.base_counts: dict[str, AcceptedCounts] = {}
        self.stopping = False
        self.training: TrainingRound | None = None

    def stop(self, *args: Any) -> None:
        """Save the state after the current step and end; a signal handler."""
        self.stopping = True
        if self.training is not None:
            self.training.trainer.stopping = True

    def run(self) -> list[VersionRecord]:
        """Run rounds while there are enough new documents; returns the versions."""
        records = []
        try:
            while not self.stopping and (plan := self.next_plan()):
                record = self.run_round(plan)
                if record is None:
                    break
                records.append(record)
        except NonFiniteLoss as error:
            report_failure(self.folder, error)
        return records

    def next_plan(self) -> RoundPlan | None:
        """The round in progress, or a new one if there are enough documents."""
        parent = read_current(self.folder).number
        plan = self.rounds.plan()
        if plan is not None and (plan.parent, plan.base) == (parent, self.teacher.base):
            return plan
        self.rounds.discard()  # Another drafter was made the current one.
        settings = self.round_settings
        counter = DocumentCounter(self.folder)
        counter.update()
        if not counter.is_enough(settings):
            return None
        length = document_length(settings, self.teacher.target)
        return self.rounds.create(parent, self.teacher.base, settings, length)

    def run_round(self, plan: RoundPlan) -> VersionRecord | None:
        """Train and judge; None: the job was stopped."""
        self.training = TrainingRound(
            self.folder,
            self.teacher,
            plan,
            self.round_settings,
            self.settings,
            self.on_step,
            self.base_counts,
        )
        self.training.trainer.stopping = self.stopping
        try:
            record = self.training.run()
        except NonFiniteLoss:
            # The same documents would fail again: the next round begins behind them.
            self.rounds.finish(plan)
            raise
        finally:
            self.training.release()
        if record is not None:
            promote_candidates(self.folder)
            write_status(self.folder, TrainerStatus("waiting"))
        return record


def report_failure(folder: LearnFolder, error: Exception) -> None:
    """Log why a round failed, if the disk takes it."""
    reason = str(error) or type(error).__name__
    try:
        write_status(folder, TrainerStatus("failed", error=reason))
        append_event(folder.events, "failed", reason)
    except OSError:  # It may be full.
        print(f"learning failed: {reason}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    folder = LearnFolder(Path(arguments[0]))
    try:
        job = TrainJob(folder, learner_settings_from_json(arguments[1]))
        signal.signal(signal.SIGTERM, job.stop)
        job.run()
    except Exception as error:
        if not isinstance(error, UserError | OSError):
            traceback.print_exc()
        report_failure(folder, error)
        return FAILED_EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
