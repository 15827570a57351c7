"""A run from its config: target or capture, documents, plan, training. What `peagle train` and `make-drafter` call."""

import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peagle.data.records import Report, ignore
from peagle.drafter.formats import compact
from peagle.errors import UserError
from peagle.loaded import load
from peagle.model_pair import choose_device
from peagle.target import Target
from peagle.target.precision import choose_dtype
from peagle.train.config import TrainConfig, as_yaml
from peagle.train.features.features import StoredFeatures
from peagle.train.features.stored import StoredTarget
from peagle.train.journal import Journal
from peagle.train.optim.parallel import start
from peagle.train.plan import Plan, plan_of
from peagle.train.setup import Material, capture_in, fitted, material_of, new_drafter
from peagle.train.trainer import Progress, Trainer


class TrainRun:
    """The parts of a training run, put together: `plan` tells what it takes, `train` does it."""

    def __init__(
        self, config: TrainConfig, report: Report = ignore, like: "TrainRun | None" = None
    ) -> None:
        """`like`: a run over the same data, whose target, documents and features serve this one too."""
        self.config = config = fitted(config)
        self.target: Target
        self.material: Material
        self.trainer: Trainer
        self.world, device = start(choose_device(config.device))
        self.target = like.target if like else load_teacher(config, device)
        self.material = like.material if like else material_of(config, self.target, report)
        features = like.trainer.features if like else None
        if isinstance(self.target, StoredTarget):
            features = features or StoredFeatures(self.target, self.material.target_ids)
        self.trainer = Trainer(config, self.target, self.material, self.world, features)

    def plan(self) -> Plan:
        material = self.material
        return plan_of(
            self.config,
            self.target,
            self.trainer.drafter,
            material.documents,
            self.trainer.total,
            material.coverage,
        )

    def train(
        self, progress: Progress, say: Callable[[str], None], stop_after: float = math.inf
    ) -> bool:
        """Starts or resumes; True when the last step is done. The first Ctrl-C ends it after the step under way."""
        trainer, out = self.trainer, self.trainer.out
        if trainer.resume():
            say(f"resuming {out} after step {trainer.step} of {trainer.total}")
        journal = Journal(out, trainer.step, self.world.first)
        if self.world.first:
            out.mkdir(parents=True, exist_ok=True)
            (out / "config.yaml").write_text(as_yaml(self.config))
        with ended_by_interrupt(trainer):
            return trainer.train(journal, progress, stop_after)


@contextmanager
def ended_by_interrupt(trainer: Trainer) -> Iterator[None]:
    """The first Ctrl-C lets the step finish and its state be saved; the second is one as ever."""
    before = signal.getsignal(signal.SIGINT)

    def stop(*args: Any) -> None:
        trainer.stopping = True
        signal.signal(signal.SIGINT, before)

    own = threading.current_thread() is threading.main_thread()
    if own:
        signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        if own:
            signal.signal(signal.SIGINT, before)


def load_teacher(config: TrainConfig, device: str) -> Target:
    """bfloat16 on a GPU; on a CPU float32, which is as fast there and exact. From a capture, what it kept."""
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    if folder := capture_in(config.data):
        return StoredTarget(folder, choose_dtype(dtype, device), device)
    return load(config.target, device=device, dtype=dtype).target


def dry_run(config: TrainConfig) -> Path:
    """An untrained checkpoint of the sizes a run would have; no data is needed for a whole vocabulary."""
    config = fitted(config)
    target = load_teacher(config, choose_device(config.device))
    ids = material_of(config, target).target_ids if config.draft_vocab and config.data else None
    if config.draft_vocab and ids is None:
        raise UserError(
            "a draft vocabulary is chosen from the data: give `data`, or draft_vocab = 0"
        )
    folder = Path(config.out).expanduser() / "drafter"
    compact.save(new_drafter(config, target, ids), folder, target)
    return folder
