"""DIR/trainer.json: what the trainer does now.

The job writes it; its parent does while no job runs or the job is stopped.
"""

import json
import time
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

from peagle.learn.folder import LearnFolder
from peagle.paths import write_json

TrainerState = Literal["waiting", "training", "judging", "paused", "failed"]


@dataclass(frozen=True, slots=True)
class TrainerStatus:
    state: TrainerState = "waiting"
    pid: int = 0  # of the job; 0: none runs
    step: int = 0
    steps: int = 0
    loss: float | None = None
    documents: int = 0  # of the round
    new_documents: int = 0  # stored since the last round
    error: str | None = None  # why the last round failed
    updated: float = 0.0  # seconds since the epoch


def read_status(folder: LearnFolder) -> TrainerStatus:
    """The last status; the default one if there is no readable file."""
    try:
        values = json.loads(folder.trainer.read_text())
        known = {field.name for field in fields(TrainerStatus)}
        return TrainerStatus(**{key: value for key, value in values.items() if key in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return TrainerStatus()


def write_status(folder: LearnFolder, status: TrainerStatus) -> None:
    write_json(folder.trainer, asdict(replace(status, updated=time.time())))
