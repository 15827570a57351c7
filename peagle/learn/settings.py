"""LearnerSettings: what a server tells the trainer's process that it starts."""

import json
from dataclasses import asdict, dataclass

from peagle.core import Method


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """The pair as it is served, and what the trainer may use."""

    pair: str
    target: str | None = None
    drafter: str | None = None  # One folder: that of the method.
    device: str = "auto"
    context: int | None = None
    method: Method | None = None  # None: the pair's.
    # Fraction of time while requests run; 0: only when none runs; None: 0 on a CPU, 0.1 on a GPU.
    time_share: float | None = None
    memory_gib: float = 0.0  # GPU memory that the engines leave free; 0: not limited.
    replay: str | None = None  # Folder of regenerated answers to replay.

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def learner_settings_from_json(text: str) -> LearnerSettings:
    return LearnerSettings(**json.loads(text))
