"""The log of a run: a line of JSON per record, TensorBoard events, and a figure of the curves."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from peagle.core import Step
from peagle.train.curves import draw_curves
from peagle.train.records import EvaluationRecord, Record, StepRecord


class Journal:
    """The records of a run in log.jsonl. Only the main process writes (`active`).

    A resumed run drops the records of steps that it runs again.
    """

    def __init__(self, folder: Path, step: int = 0, active: bool = True) -> None:
        self.folder = folder
        self.active = active
        self.file = folder / "log.jsonl"
        self.records: list[Record] = []
        self.events: Any = None
        if not active:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            records = map(parse_record, self.file.read_text().splitlines())
            self.records = [record for record in records if record and record.step <= step]
            self.file.write_text("".join(map(to_json_line, self.records)))
        try:
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(str(folder / "events"), purge_step=step)
        except ImportError:  # peagle[train] installs it; the log is complete without it.
            pass

    def log_step(self, record: StepRecord) -> None:
        self._write(record)
        scalars = {
            "loss": record.loss,
            "lr": record.lr,
            "norm": record.norm,
            "seconds_per_step": record.seconds_per_step,
        }
        matches = {f"match/depth_{i}": share for i, share in enumerate(record.match)}
        self._add_events(record.step, scalars | matches)

    def log_evaluation(self, step: int, k: int, length: float, steps: Sequence[Step]) -> None:
        """Log the acceptance length on held-out answers and the fraction accepted by position."""
        drafts = max(len(steps), 1)
        shares = [sum(s.accepted > i for s in steps) / drafts for i in range(k)]
        self._write(EvaluationRecord(step, k, length, [round(share, 4) for share in shares]))
        accepted = {f"accepted/{i + 1}": share for i, share in enumerate(shares)}
        self._add_events(step, {"acceptance_length": length} | accepted)
        if self.active:
            draw_curves(self.records, self.folder / "curves.png")

    def _write(self, record: Record) -> None:
        if not self.active:
            return
        self.records.append(record)
        with self.file.open("a") as file:
            file.write(to_json_line(record))

    def _add_events(self, step: int, scalars: dict[str, float]) -> None:
        if self.events is not None:
            for name, value in scalars.items():
                self.events.add_scalar(name, value, step)
            self.events.flush()


def to_json_line(record: Record) -> str:
    return json.dumps(asdict(record)) + "\n"


def parse_record(line: str) -> Record | None:
    """The record of a line; None for the torn last line of a killed process."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    kind: Any = EvaluationRecord if "acceptance_length" in values else StepRecord
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})
