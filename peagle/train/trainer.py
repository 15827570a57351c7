"""The training loop: features -> gradients -> optimizer, with logs, evaluations and states."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from peagle.core import Step
from peagle.drafter import Drafter
from peagle.drafter.formats import compact
from peagle.errors import UserError
from peagle.target import Target
from peagle.train.config import TrainConfig
from peagle.train.data.pack import Batch
from peagle.train.drafter_init import new_drafter, trained_copy
from peagle.train.evaluation.acceptance import DraftReplay
from peagle.train.evaluation.replay import acceptance_length
from peagle.train.features.features import (
    CachedFeatures,
    FeatureExtractor,
    FeatureSource,
    cache_fits,
    select_taps,
)
from peagle.train.features.packed_attention import supports_packed_attention
from peagle.train.feed import StepDataset
from peagle.train.journal import Journal
from peagle.train.objective.gradients import pack_gradients
from peagle.train.objective.loss import Loss, LossSums
from peagle.train.objective.passes import DrafterPasses
from peagle.train.optim.optimizer import Optimizers
from peagle.train.optim.parallel import GradientSync, World
from peagle.train.optim.rounded_weights import RoundedWeights
from peagle.train.plan import estimate_training_bytes
from peagle.train.records import StepRecord
from peagle.train.setup import TrainingData
from peagle.train.state import FULL_STATE, RunState, check_same_run, load_state, save_state

MEMORY_MARGIN = 1.2  # factor on the estimated memory of training

Progress = Callable[[int, int, StepRecord], None]  # steps done, steps in all, the last record


@dataclass(slots=True)
class LogInterval:
    """The steps since the last log."""

    started: float
    sums: LossSums
    losses: list[Tensor] = field(default_factory=list)  # of each step


class NonFiniteLoss(UserError):
    """A loss or a gradient is not finite: the same documents give it again."""


class Trainer:
    def __init__(
        self,
        config: TrainConfig,
        target: Target,
        data: TrainingData,
        world: World,
        features: FeatureSource | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """`features` may come from another run over the same documents, with more taps.

        `drafter`: a drafter to train, as it is; None: a new one as the config describes.
        """
        self.config = config
        self.target = target
        self.data = data
        self.world = world
        self.out = Path(config.out).expanduser()
        self.flex = target.device.type == "cuda"
        self.drafter = drafter or new_drafter(config, target, data.target_ids)
        self.drafter.gradient_checkpointing = config.checkpointing
        dtype = torch.float32 if target.dtype == torch.float32 else torch.bfloat16
        self.passes = DrafterPasses(self.drafter, dtype)
        self.features = select_taps(
            features or self._new_features(), self.drafter.config.aux_layer_ids or ()
        )
        self.loss = self._new_loss()
        self.dataset = StepDataset(data.documents, config, world, str(target.device))
        epoch_steps = config.epochs * self.dataset.steps_per_epoch()
        self.total_steps = config.steps or math.ceil(epoch_steps)
        self.gradient_sync = GradientSync(self.passes, world, config.parallel)
        self.optimizers = Optimizers(self.passes, config, self.total_steps)
        self.rounded_weights = RoundedWeights(self.drafter) if config.rounded else None
        if self.flex and config.compile and not self.gradient_sync.sharded:
            self.passes.compile()
            self.loss.compile()
        self.stopping = False  # Set it to save after the current step and return.
        self.clock_start = math.inf  # when the first step of this process was done
        self.clock_before = 0.0  # what the clock of `minutes` showed before this process
        self.step = 0
        self.seconds = 0.0  # of training, over all resumed parts
        self.tokens = 0  # of documents, seen by the target
        self.grad_norm: Tensor  # of the last step
        self.lr_fraction: float  # of the peak learning rate, in the last step

    @cached_property
    def digest(self) -> str:
        """The digest of the documents: a run is resumed only with the same documents."""
        return self.data.documents.digest

    def _new_features(self) -> FeatureSource:
        packed = self.flex and self.config.compile and supports_packed_attention(self.target)
        aux_layer_ids = self.drafter.config.aux_layer_ids or ()
        features = FeatureExtractor(self.target, aux_layer_ids, packed)
        documents = self.data.documents
        needed = MEMORY_MARGIN * estimate_training_bytes(self.config, self.drafter, documents)
        if self.config.remember and cache_fits(features, documents, needed):
            return CachedFeatures(features, documents)
        return features

    def _new_loss(self) -> Loss:
        config = self.config
        return Loss(
            self.drafter.lm_head,
            config.k,
            config.loss,
            config.mix,
            config.depth_weight,
            self.features.softcap,
            on_policy=config.on_policy,
        )

    def resume(self) -> bool:
        """Continue from the newest state; False if there is none."""
        state = load_state(self.out / "state", self.passes, self.optimizers, self._check_same_run)
        step = state.step if state else 0
        if self.world.sum_number(float(step), self.target.device) != self.world.size * step:
            raise UserError(
                f"not all processes find the state of step {step}: {self.out} must be a shared"
                " folder"
            )
        if state is None:
            return False
        self.step = state.step
        self.seconds = state.seconds
        self.clock_before = state.seconds if state.clock is None else state.clock
        self.tokens = state.tokens
        if self.rounded_weights is not None:
            self.rounded_weights.scales = [x.to(self.target.device) for x in state.scales]
        return True

    def _check_same_run(self, state: RunState) -> None:
        check_same_run(state, self.config, self.digest, self.out)

    def train(self, journal: Journal, progress: Progress, stop_after: float = math.inf) -> bool:
        """Train to the last step, for `stop_after` seconds, or until `stopping`.

        Returns whether the run is over: its last step is done, or its `minutes` have passed.
        """
        started = time.perf_counter()
        interval = LogInterval(started, self._zero_sums())
        for batches in [] if self._is_over() else self.dataset.load(self.step, self.total_steps):
            sums = self._train_step(batches)
            interval.sums += sums
            # A gradient that is not finite counts as a loss that is not.
            interval.losses.append(sums.loss.sum() + 0 * self.grad_norm)
            self.step += 1
            self.clock_start = min(self.clock_start, time.perf_counter())
            late = self._is_late(started + stop_after)
            last = self._is_over()
            save = last or late or self._is_due(self.config.save_every)
            if save or self._is_due(self.config.log_every):
                self._check_finite(interval.losses)
                now = time.perf_counter()
                self.seconds += now - interval.started
                record = self._log_record(interval, now)
                journal.log_step(record)
                progress(self.step, self.total_steps, record)
                interval = LogInterval(now, self._zero_sums())
            if save:
                self.save()
            if last or self._is_due(self.config.eval_every):
                self.evaluate(journal)
                interval.started = time.perf_counter()
            if last:
                break
            if late:
                return False
        self.save_drafter()
        return True

    def _is_over(self) -> bool:
        return self._schedule_step() >= self.total_steps

    def _schedule_step(self) -> float:
        """The step that decides the learning rate; with `minutes`, time passes as steps do.

        All processes agree on it.
        """
        if not self.config.minutes:
            return self.step
        spent = self.world.sum_number(self._clock(), self.target.device) / self.world.size
        return max(self.step, spent / (60 * self.config.minutes) * self.total_steps)

    def _clock(self) -> float:
        """The seconds that count for `minutes`, over all resumed parts.

        Evaluations and saving count; the first step of each process, which compiles, does not.
        """
        return self.clock_before + max(0.0, time.perf_counter() - self.clock_start)

    def _is_late(self, deadline: float) -> bool:
        """Whether any process is late: all of them must stop together, or the others would hang."""
        late = self.stopping or time.perf_counter() > deadline
        return self.world.sum_number(float(late), self.target.device) > 0

    def _is_due(self, interval: int) -> bool:
        return interval > 0 and self.step % interval == 0

    def _zero_sums(self) -> LossSums:
        return LossSums.zeros(self.config.k, self.target.device)

    def _train_step(self, batches: list[Batch]) -> LossSums:
        """One optimizer step. All rows have the same weight, whichever process computes them."""
        device = self.target.device
        rows = self.world.sum_number(float(sum(b.num_supervised for b in batches)), device)
        scale = self.world.size / max(rows, 1.0)
        sums = self._zero_sums()
        with self._rounding():
            for batch in batches:
                features = self.features(batch)
                sums += pack_gradients(self.passes, batch, features, self.loss, scale, self.flex)
        self.gradient_sync.average()
        self.grad_norm = self.gradient_sync.clip(self.config.clip)
        self.lr_fraction = self.optimizers.step(self._schedule_step())
        tokens = float(sum(sum(batch.lengths) for batch in batches))
        self.tokens += int(self.world.sum_number(tokens, device))
        return sums

    def _rounding(self) -> AbstractContextManager[None]:
        """Rounded weights in the last part of the training, as `rounded` says."""
        start = (1 - self.config.rounded) * self.total_steps
        if self.rounded_weights is None:
            return nullcontext()
        if self._schedule_step() < start:  # Also again, if a resumed run has more minutes.
            self.rounded_weights.scales.clear()
            return nullcontext()
        return self.rounded_weights.in_use(self.step)

    def _check_finite(self, losses: list[Tensor]) -> None:
        """Stop at a loss or a gradient that is not finite; the last state is older."""
        values = self.world.all_reduce(torch.stack(losses).clone()).tolist() if losses else []
        for i, value in enumerate(values):
            if not math.isfinite(value):
                step = self.step - len(values) + i
                keys = ", ".join(self.dataset.document_keys(step)[:8])
                raise NonFiniteLoss(
                    f"the loss of step {step} is {value}: stopped. Good states are kept in"
                    f" {self.out / 'state'}; examine the documents of that batch ({keys}, ...),"
                    " lower lr, or use dtype = 'float32'"
                )

    def _log_record(self, interval: LogInterval, now: float) -> StepRecord:
        sums = interval.sums
        total = LossSums(
            *(self.world.all_reduce(x.clone()) for x in (sums.loss, sums.matches, sums.rows))
        )
        seconds_per_step = (now - interval.started) / max(len(interval.losses), 1)
        rows = total.rows.clamp(min=1)
        return StepRecord(
            step=self.step,
            loss=float(total.loss.sum() / rows.sum()),
            match=[round(x, 4) for x in (total.matches / rows).tolist()],
            loss_per_depth=[round(x, 4) for x in (total.loss / rows).tolist()],
            lr=self.config.lr * self.lr_fraction,
            norm=float(self.grad_norm),
            rows=int(total.rows.sum()),
            tokens=self.tokens,
            seconds=round(self.seconds, 2),
            seconds_per_step=round(seconds_per_step, 5),
        )

    def evaluate(self, journal: Journal) -> None:
        """Log the acceptance length on held-out answers."""
        if not len(self.data.held_out) or not self.world.is_main or self.gradient_sync.sharded:
            return
        self.drafter.eval()
        rounded = self.rounded_weights
        in_use = rounded.in_use(self.step) if rounded and rounded.scales else nullcontext()
        with in_use:  # Not compiled: compiling for these shapes takes longer than evaluating.
            steps = self.held_out_steps(DrafterPasses(self.drafter, self.passes.dtype))
        self.drafter.train()
        journal.log_evaluation(self.step, self.config.logged_k, acceptance_length(steps), steps)

    def held_out_steps(self, passes: DrafterPasses) -> list[Step]:
        """The steps of decoding the held-out answers with the drafter of these passes."""
        replay = self.replay(passes)
        k = self.config.logged_k
        return replay.chain_steps(self.data.held_out, [k])[k]

    def replay(self, passes: DrafterPasses) -> DraftReplay:
        """Drafting along any answers with the drafter of these passes."""
        return DraftReplay(passes, self.features.uncached(), self.config.pack_tokens, self.flex)

    def save(self) -> None:
        scales = [] if self.rounded_weights is None else self.rounded_weights.scales
        state = RunState(
            self.step,
            asdict(self.config),
            self.digest,
            self.seconds,
            self.tokens,
            self._clock(),
            [x.cpu() for x in scales],
        )
        save_state(self.out / "state", state, self.passes, self.optimizers, self.world)

    def save_drafter(self) -> Path:
        """Write the current drafter in the compact format."""
        state = get_model_state_dict(self.passes, options=FULL_STATE)
        folder = self.out / "drafter"
        if self.world.is_main:
            drafter = trained_copy(self.drafter, state, self.target)
            compact.save(drafter, folder, self.target, torch.bfloat16)
        self.world.barrier()
        return folder
