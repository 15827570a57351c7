"""What a run tells: a line of JSON per log, TensorBoard events, and a picture of loss and acceptance."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.core import Step
from peagle.train.objective.loss import Sums

if TYPE_CHECKING:
    from peagle.train.trainer import Trainer


class Journal:
    """Only the first process writes. On resume, lines of steps that are run again are dropped."""

    def __init__(self, folder: Path, step: int = 0, active: bool = True) -> None:
        self.folder, self.active = folder, active
        self.file = folder / "log.jsonl"
        self.entries: list[dict[str, Any]] = []
        self.events: Any = None
        if not active:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            self.entries = [
                entry for entry in map(_parse, self.file.read_text().splitlines()) if entry
            ]
            self.entries = [entry for entry in self.entries if entry["step"] <= step]
            self.file.write_text("".join(json.dumps(entry) + "\n" for entry in self.entries))
        try:
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(str(folder / "events"), purge_step=step)
        except ImportError:  # peagle[train] brings it; the log is complete without
            pass

    def log(
        self, step: int, sums: Sums, steps: int, seconds: float, trainer: "Trainer"
    ) -> dict[str, float]:
        total = Sums(
            *(trainer.world.total(x.clone()) for x in (sums.loss, sums.matches, sums.rows))
        )
        rows = total.rows.clamp(min=1)
        entry: dict[str, Any] = {
            "step": step,
            "loss": float(total.loss.sum() / rows.sum()),
            "match": [round(x, 4) for x in (total.matches / rows).tolist()],
            "loss_per_depth": [round(x, 4) for x in (total.loss / rows).tolist()],
            "lr": trainer.config.lr * trainer.share,
            "norm": float(trainer.norm),
            "rows": int(total.rows.sum()),
            "tokens": trainer.tokens,
            "seconds": round(trainer.seconds, 2),
            "seconds_per_step": round(seconds / max(steps, 1), 5),
        }
        self._write(entry)
        scalars = {key: entry[key] for key in ("loss", "lr", "norm", "seconds_per_step")}
        self._events(step, scalars | {f"match/depth_{i}": x for i, x in enumerate(entry["match"])})
        return scalars

    def evaluation(self, step: int, k: int, length: float, steps: Sequence[Step]) -> None:
        drafts = max(len(steps), 1)
        shares = [sum(s.accepted > i for s in steps) / drafts for i in range(k)]
        entry = {
            "step": step,
            "k": k,
            "acceptance_length": length,
            "accepted": [round(x, 4) for x in shares],
        }
        self._write(entry)
        self._events(
            step,
            {"acceptance_length": length} | {f"accepted/{i + 1}": x for i, x in enumerate(shares)},
        )
        if self.active:
            from peagle.train.curves import draw

            draw(self.entries, self.folder / "curves.png")

    def _write(self, entry: dict[str, Any]) -> None:
        if not self.active:
            return
        self.entries.append(entry)
        with self.file.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def _events(self, step: int, scalars: dict[str, float]) -> None:
        if self.events is not None:
            for name, value in scalars.items():
                self.events.add_scalar(name, value, step)
            self.events.flush()


def _parse(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:  # the torn last line of a killed process
        return None
