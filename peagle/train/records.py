"""The records of a run: the lines of log.jsonl. Field names are the keys of the file."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The steps since the record before."""

    step: int  # steps done
    loss: float  # per row
    match: list[float] = field(default_factory=list)  # per depth: best token is the teacher's
    loss_per_depth: list[float] = field(default_factory=list)
    lr: float = 0.0
    norm: float = 0.0  # of the gradient
    rows: int = 0  # supervised rows
    tokens: int = 0  # of documents, since the run began
    seconds: float = 0.0  # of training, since the run began
    seconds_per_step: float = 0.0


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """The acceptance length on held-out answers."""

    step: int  # steps done
    k: int
    acceptance_length: float
    accepted: list[float] = field(default_factory=list)  # fraction of drafts accepted by position


Record = StepRecord | EvaluationRecord
