"""A run from its config: target or capture, documents, plan, training."""

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
from peagle.train.config import TrainConfig, to_yaml
from peagle.train.drafter_init import inherit_window, new_drafter
from peagle.train.features.stored import StoredFeatures, StoredTarget
from peagle.train.journal import Journal
from peagle.train.optim.parallel import join_processes
from peagle.train.plan import Plan, estimate_plan
from peagle.train.setup import (
    TrainingData,
    apply_capture,
    earlier_vocabulary,
    find_capture,
    load_training_data,
)
from peagle.train.trainer import Progress, Trainer


class TrainRun:
    """The parts of a training run: `plan` estimates its cost, `train` runs it."""

    def __init__(
        self, config: TrainConfig, report: Report = ignore, shared: "TrainRun | None" = None
    ) -> None:
        """`shared` is a run over the same data, whose target, documents and features are reused."""
        self.config = config = inherit_window(apply_capture(config))
        self.target: Target
        self.data: TrainingData
        self.trainer: Trainer
        self.world, device = join_processes(choose_device(config.device))
        self.target = shared.target if shared else load_teacher(config, device)
        self.data = shared.data if shared else load_training_data(config, self.target, report)
        features = shared.trainer.features if shared else None
        if isinstance(self.target, StoredTarget):
            features = features or StoredFeatures(self.target, self.data.target_ids)
        self.trainer = Trainer(config, self.target, self.data, self.world, features)

    def plan(self) -> Plan:
        return estimate_plan(
            self.config, self.target, self.trainer.drafter, self.data, self.trainer.total_steps
        )

    def train(
        self, progress: Progress, report: Callable[[str], None], stop_after: float = math.inf
    ) -> bool:
        """Start or resume; True when the last step is done.

        The first Ctrl-C ends the run after the current step.
        """
        trainer = self.trainer
        out = trainer.out
        if trainer.resume():
            report(f"resuming {out} after step {trainer.step} of {trainer.total_steps}")
        journal = Journal(out, trainer.step, self.world.is_main)
        if self.world.is_main:
            out.mkdir(parents=True, exist_ok=True)
            (out / "config.yaml").write_text(to_yaml(self.config))
        with stop_on_interrupt(trainer):
            return trainer.train(journal, progress, stop_after)


@contextmanager
def stop_on_interrupt(trainer: Trainer) -> Iterator[None]:
    """At the first Ctrl-C, finish the step and save; the second one interrupts as usual."""
    previous = signal.getsignal(signal.SIGINT)

    def stop(*args: Any) -> None:
        trainer.stopping = True
        signal.signal(signal.SIGINT, previous)

    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread:
        signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, previous)


def load_teacher(config: TrainConfig, device: str) -> Target:
    """Load the target, or the parts of it in a capture.

    The automatic dtype is bfloat16 on a GPU and float32 on a CPU, where it is as fast, and exact.
    """
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    if folder := find_capture(config.data):
        return StoredTarget(folder, choose_dtype(dtype, device), device)
    return load(
        config.target, device=device, dtype=dtype, context=config.context or None, stored=False
    ).target


def dry_run(config: TrainConfig) -> Path:
    """Write an untrained checkpoint of the run's sizes; a whole vocabulary needs no data."""
    config = inherit_window(apply_capture(config))
    target = load_teacher(config, choose_device(config.device))
    ids = None
    if config.draft_vocab < 0:
        ids = earlier_vocabulary(config, target)
    elif config.draft_vocab and config.data:
        ids = load_training_data(config, target).target_ids
    if config.draft_vocab > 0 and ids is None:
        raise UserError(
            "a draft vocabulary is chosen from the data: give `data`, or draft_vocab = 0"
        )
    folder = Path(config.out).expanduser() / "drafter"
    compact.save(new_drafter(config, target, ids), folder, target)
    return folder
