"""The learner of a server: `python -m peagle.learn.process DIR SETTINGS_JSON`.

It waits for enough new documents, starts a job that trains (train_job.py) at the lowest priority,
and stops it while requests run. Nothing here can fail a request: the server only reads the folder.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from peagle.errors import UserError
from peagle.learn.events import append_event
from peagle.learn.file_lock import try_lock
from peagle.learn.folder import LearnFolder
from peagle.learn.promotion import promote_candidates
from peagle.learn.settings import LearnerSettings, learner_settings_from_json
from peagle.learn.status import TrainerStatus, read_status, write_status
from peagle.learn.training.new_documents import DocumentCounter
from peagle.learn.training.pacer import is_busy
from peagle.learn.training.round_folder import RoundFolder
from peagle.learn.training.round_settings import read_round_settings
from peagle.learn.training.throttle import Throttle, ThrottledJob, run_throttled

POLL_SECONDS = 1.0
MAX_READ_BYTES = 8 << 20  # of the store at a time: this process does not wait for idle engines
STATUS_SECONDS = 1.0  # between two reports that a job is paused
FIRST_BACKOFF_SECONDS = 10.0
MAX_BACKOFF_SECONDS = 600.0
USAGE_ERROR = 2  # exit code of a process that would fail again


class Learner:
    def __init__(self, folder: LearnFolder, settings: LearnerSettings, on_gpu: bool) -> None:
        self.folder = folder
        self.settings = settings
        # With a share of time, a job on a GPU paces itself (pacer.py): it is not stopped.
        paces_itself = on_gpu and settings.time_share != 0
        self.throttle = Throttle(1.0 if paces_itself else settings.time_share or 0.0)
        self.counter = DocumentCounter(folder)
        self.stopping = False
        self.failures = 0  # jobs that failed one after another
        self.reported = 0.0

    def stop(self, *args: Any) -> None:
        """A signal handler."""
        self.stopping = True

    def run(self) -> None:
        """Learn until `stop`; wait while another process learns in the folder."""
        while (lock := try_lock(self.folder.learner_lock)) is None:
            if self.stopping:
                return
            self._sleep(POLL_SECONDS)
        try:
            self._run()
        finally:
            os.close(lock)

    def _run(self) -> None:
        promote_candidates(self.folder)  # A killed job may have left one.
        self._report(TrainerStatus("waiting", error=read_status(self.folder).error))
        while not self.stopping:
            try:
                if self.is_due():
                    self.run_job()
            except UserError as error:  # training.json may be edited at any time.
                self._report(replace(read_status(self.folder), state="failed", error=str(error)))
            self._sleep(POLL_SECONDS)
        status = read_status(self.folder)
        self._report(replace(status, state="waiting", pid=0))

    def is_due(self) -> bool:
        """Whether there is a round to resume, or enough new documents for one."""
        if RoundFolder(self.folder).plan() is not None:
            return True
        self.counter.update(MAX_READ_BYTES)
        status = read_status(self.folder)
        if status.new_documents != self.counter.new:
            self._report(replace(status, new_documents=self.counter.new))
        return self.counter.is_enough(read_round_settings(self.folder))

    def run_job(self) -> None:
        """Run one job; after a failure, wait longer and longer."""
        command = [sys.executable, "-m", "peagle.learn.train_job"]
        arguments = [str(self.folder.root), self.settings.to_json()]
        job = ThrottledJob([*command, *arguments], read_round_settings(self.folder).nice)
        code = run_throttled(
            job,
            self.throttle,
            lambda: is_busy(self.folder),
            lambda: self.stopping,
            self._report_pause,
        )
        status = replace(read_status(self.folder), pid=0)
        if code == 0 or self.stopping:
            self.failures = 0
            state = status.state if status.error else "waiting"
            self._report(replace(status, state=state))
            return
        self.failures += 1
        backoff = min(FIRST_BACKOFF_SECONDS * 2 ** (self.failures - 1), MAX_BACKOFF_SECONDS)
        if code < 0:
            reason = f"the job was killed by {signal.Signals(-code).name}"
            self._report(replace(status, state="failed", error=reason))
            with suppress(OSError):
                append_event(self.folder.events, "failed", f"{reason}: it resumes its round")
        self._sleep(backoff)

    def _report_pause(self, running: bool) -> None:
        """Report that the job is paused, not too often; the job itself reports that it runs."""
        if not running and time.monotonic() - self.reported > STATUS_SECONDS:
            self.reported = time.monotonic()
            self._report(replace(read_status(self.folder), state="paused"))

    def _report(self, status: TrainerStatus) -> None:
        with suppress(OSError):  # The disk may be full; the server reports that.
            write_status(self.folder, status)

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.stopping:
            time.sleep(min(0.2, seconds))


def uses_gpu(device: str) -> bool:
    """Whether jobs train on a GPU; torch is imported only to find out what auto is."""
    if device == "auto":
        import torch

        return torch.cuda.is_available()
    return device.startswith("cuda")


def main(arguments: list[str]) -> int:
    folder = LearnFolder(Path(arguments[0]))
    settings = learner_settings_from_json(arguments[1])
    try:
        read_round_settings(folder)
        learner = Learner(folder, settings, uses_gpu(settings.device))
        signal.signal(signal.SIGTERM, learner.stop)
        signal.signal(signal.SIGINT, learner.stop)
        learner.run()
    except UserError as error:
        print(f"learning is off: {error}", file=sys.stderr, flush=True)
        return USAGE_ERROR
    except OSError as error:  # It may be full; the server starts this process again.
        print(f"learning failed: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
