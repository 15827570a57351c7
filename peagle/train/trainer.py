"""The training loop: features -> gradients -> optimizer, with logs, evaluations and states on the way."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from peagle.core import Step
from peagle.drafter.formats import compact
from peagle.errors import UserError
from peagle.target import Target
from peagle.train.config import TrainConfig
from peagle.train.evaluation.acceptance import acceptance, length_of
from peagle.train.features.features import (
    AnyFeatures,
    Features,
    Remembered,
    memorable,
    online,
    packable,
    with_taps,
)
from peagle.train.feed import Feed
from peagle.train.journal import Journal
from peagle.train.objective.gradients import pack_gradients
from peagle.train.objective.loss import Loss, Sums
from peagle.train.objective.passes import Passes
from peagle.train.optim.optimizer import Optimizers
from peagle.train.optim.parallel import Joined, World
from peagle.train.plan import training_bytes
from peagle.train.setup import Material, new_drafter, trained_copy
from peagle.train.state import WHOLE, load_state, save_state

FREE = (
    "out",
    "data",
    "device",
    "compile",
    "remember",
    "log_every",
    "save_every",
    "eval_every",
    "eval_k",
    "checkpointing",
    "segments",
)

Progress = Callable[
    [int, int, dict[str, float]], None
]  # steps done, steps in all, what is measured


class Trainer:
    def __init__(
        self,
        config: TrainConfig,
        target: Target,
        material: Material,
        world: World,
        features: AnyFeatures | None = None,
    ) -> None:
        """`features`: those of another run over the same documents, with these taps among theirs."""
        self.config, self.target, self.material, self.world = config, target, material, world
        self.out = Path(config.out).expanduser()
        self.flex = target.device.type == "cuda"
        self.drafter = new_drafter(config, target, material.target_ids)
        self.drafter.gradient_checkpointing = config.checkpointing
        dtype = torch.float32 if target.dtype == torch.float32 else torch.bfloat16
        self.passes = Passes(self.drafter, dtype)
        self.features = with_taps(
            features or self._features(), self.drafter.config.aux_layer_ids or ()
        )
        self.loss = Loss(
            self.drafter.lm_head,
            config.k,
            config.loss,
            config.mix,
            config.depth_weight,
            self.features.softcap,
        )
        self.feed = Feed(material.documents, config, world, str(target.device))
        self.total = config.steps or math.ceil(config.epochs * self.feed.steps_per_epoch())
        self.joined = Joined(self.passes, world, config.parallel)
        self.optimizers = Optimizers(self.passes, config, self.total)
        if self.flex and config.compile and not self.joined.sharded:
            self.passes.compile()
            self.loss.compile()
        self.stopping = False  # set from outside: save after this step and return
        self.step = 0
        self.seconds = 0.0  # of training, over all resumed parts
        self.tokens = 0  # of documents, seen by the target

    @cached_property
    def digest(self) -> str:
        """Of the documents: a run is resumed only with the same."""
        return self.material.documents.digest

    def _features(self) -> Features | Remembered:
        aux = self.drafter.config.aux_layer_ids or ()
        features = Features(
            self.target, aux, packed=self.flex and self.config.compile and packable(self.target)
        )
        documents = self.material.documents
        needed = 1.2 * training_bytes(self.config, self.drafter, self.material.documents)
        fits = self.config.remember and memorable(features, documents, needed)
        return Remembered(features, documents) if fits else features

    def resume(self) -> bool:
        """Goes on where the newest state ends, if there is one."""
        state = load_state(self.out / "state", self.passes, self.optimizers, self._require_same)
        step = state["step"] if state else 0
        if self.world.number(float(step), self.target.device) != self.world.size * step:
            raise UserError(
                f"not all processes find the state of step {step}: {self.out} must be a shared folder"
            )
        if state is None:
            return False
        self.step, self.seconds, self.tokens = state["step"], state["seconds"], state["tokens"]
        return True

    def _require_same(self, state: dict[str, Any]) -> None:
        mine = asdict(self.config)
        for key, value in (
            asdict(TrainConfig()) | state["config"]
        ).items():  # a key that it did not know yet: none set
            value = tuple(value) if isinstance(value, list) else value
            if key not in FREE and mine.get(key) != value:
                raise UserError(
                    f"the run in {self.out} was started with {key} = {value!r}, now it is {mine.get(key)!r}:"
                    " put it back, or give another `out`"
                )
        if state["data"] != self.digest:
            raise UserError(
                f"the run in {self.out} was started with other documents: give another `out`,"
                f" or remove {self.out / 'state'} to begin again with these"
            )

    def train(self, journal: Journal, progress: Progress, stop_after: float = math.inf) -> bool:
        """Until the last step, for `stop_after` seconds, or until `stopping`; tells whether it came to the end."""
        begin = time.perf_counter()
        since, sums, losses = begin, self._no_sums(), []
        for batches in self.feed(self.step, self.total):
            part = self._step(batches)
            sums += part
            losses.append(
                part.loss.sum() + 0 * self.norm
            )  # a gradient that is no number counts too
            self.step += 1
            late = self._late(begin + stop_after)
            last = self.step == self.total
            save = last or late or self._due(self.config.save_every)
            if save or self._due(self.config.log_every):
                self._check(losses)
                now = time.perf_counter()
                self.seconds += now - since
                progress(
                    self.step,
                    self.total,
                    journal.log(self.step, sums, len(losses), now - since, self),
                )
                since, sums, losses = now, self._no_sums(), []
            if save:
                self.save()
            if last or self._due(self.config.eval_every):
                self.evaluate(journal)
                since = time.perf_counter()
            if late and not last:
                return False
        self.save_drafter()
        return True

    def _late(self, deadline: float) -> bool:
        """All processes stop together, or those that go on would wait for ever."""
        late = self.stopping or time.perf_counter() > deadline
        return self.world.number(float(late), self.target.device) > 0

    def _step(self, batches: list[Any]) -> Sums:
        """Gradients of all packs, the optimizer's step; the loss of each row counts alike wherever it is computed."""
        rows = self.world.number(float(sum(batch.rows for batch in batches)), self.target.device)
        scale = self.world.size / max(rows, 1.0)
        sums = self._no_sums()
        for batch in batches:
            g, last = self.features(batch)
            sums += pack_gradients(self.passes, batch, g, last, self.loss, scale, self.flex)
        self.joined.sync()
        self.norm = self.joined.clip(self.config.clip)
        self.share = self.optimizers.step(self.step)
        seen = float(sum(sum(batch.lengths) for batch in batches))
        self.tokens += int(self.world.number(seen, self.target.device))
        return sums

    def _check(self, losses: list[torch.Tensor]) -> None:
        """A loss (or a gradient) that is no number ends the run; the last state is older than it."""
        values = self.world.total(torch.stack(losses).clone()).tolist() if losses else []
        for i, value in enumerate(values):
            if not math.isfinite(value):
                step = self.step - len(values) + i
                keys = ", ".join(self.feed.keys(step)[:8])
                raise UserError(
                    f"the loss of step {step} is {value}: stopped. Good states are kept in {self.out / 'state'};"
                    f" look at the documents of that batch ({keys}, ...), lower lr, or use dtype = 'float32'"
                )

    def evaluate(self, journal: Journal) -> None:
        """The acceptance length on held-out answers, the one that is served (acceptance.py)."""
        if not len(self.material.held_out) or not self.world.first or self.joined.sharded:
            return
        self.drafter.eval()
        steps = self.held_out_steps(self.passes)
        self.drafter.train()
        journal.evaluation(self.step, self.config.eval_k, length_of(steps), steps)

    def held_out_steps(self, passes: Passes) -> list[Step]:
        """Of decoding the held-out answers with the drafter of these passes."""
        k, features = self.config.eval_k, online(self.features)
        return acceptance(
            passes, features, self.material.held_out, [k], self.config.pack_tokens, self.flex
        )[k]

    def save(self) -> None:
        more = {
            "config": asdict(self.config),
            "data": self.digest,
            "seconds": self.seconds,
            "tokens": self.tokens,
        }
        save_state(self.out / "state", self.step, self.passes, self.optimizers, self.world, more)

    def save_drafter(self) -> Path:
        """The drafter as it is now, in our compact format."""
        state = get_model_state_dict(self.passes, options=WHOLE)
        folder = self.out / "drafter"
        if self.world.first:
            compact.save(
                trained_copy(self.drafter, state, self.target), folder, self.target, torch.bfloat16
            )
        self.world.barrier()
        return folder

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _no_sums(self) -> Sums:
        return Sums.zeros(self.config.k, self.target.device)
