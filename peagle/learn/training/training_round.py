"""One round: train the current drafter on its documents, judge the candidate, keep the version.

    documents -> Trainer (from the current drafter) -> mixed weights -> judge -> versions/NNNN

The candidate has exactly the config of the current drafter, except for the calibration, so that
an engine can copy its weights in place.
"""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from peagle.drafter import Drafter
from peagle.drafter.config import DrafterConfig
from peagle.drafter.formats import checkpoint
from peagle.errors import UserError
from peagle.learn.events import EventKind, append_event
from peagle.learn.folder import LearnFolder
from peagle.learn.settings import LearnerSettings
from peagle.learn.status import TrainerState, TrainerStatus, write_status
from peagle.learn.training.candidate import calibrate_candidate, mix_weights, save_candidate
from peagle.learn.training.judge import AcceptedCounts, Verdict, compare, count_accepted, judge
from peagle.learn.training.pacer import Pacer
from peagle.learn.training.round_folder import RoundFolder, RoundPlan
from peagle.learn.training.round_settings import RoundSettings
from peagle.learn.training.teacher import Teacher
from peagle.learn.versions import (
    LengthComparison,
    VersionRecord,
    next_number,
    version_folder,
    write_version,
)
from peagle.target import Target
from peagle.train.config import TrainConfig
from peagle.train.data.documents import (
    Documents,
    join_documents,
    read_documents,
    split_held_out,
)
from peagle.train.drafter_init import continue_drafter
from peagle.train.evaluation.acceptance import DraftReplay
from peagle.train.features.features import CachedFeatures, FeatureExtractor, FeatureSource
from peagle.train.journal import Journal
from peagle.train.objective.passes import DrafterPasses
from peagle.train.optim.parallel import World
from peagle.train.records import StepRecord
from peagle.train.setup import TrainingData
from peagle.train.trainer import Trainer

DEFAULT_DEPTHS = 8  # trained depths of a drafter whose checkpoint does not tell
CPU_SEGMENT_TOKENS = 256  # tokens of a pack per segment: dense masks of a CPU stay small
GPU_TIME_SHARE = 0.1  # fraction of time while requests run, if none is given
PACK_TOKENS = {"cpu": 1024, "cuda": 4096}
JUDGED_ANCHORS = {"cpu": 128, "cuda": 1024}  # anchors that are drafted for at once
MAX_CACHE_BYTES = 1 << 30  # of the target's features on a CPU: later epochs skip the target
REPLAY_HELD_OUT = 100  # prompts of the replay folder that judge
MAX_REPLAYS = 4  # of an answer in an epoch, if the replay folder has too few for its share

StepCallback = Callable[[int, int, float], None]  # steps done, steps in all, loss


@dataclass(frozen=True, slots=True)
class RoundData:
    training: Documents
    held_back: Documents
    replay_held_out: Documents | None  # None: there is no replay folder


@dataclass(frozen=True, slots=True)
class Candidate:
    drafter: Drafter
    mixed: float
    held_back: LengthComparison
    replay: LengthComparison | None
    verdict: Verdict


class TrainingRound:
    def __init__(
        self,
        folder: LearnFolder,
        teacher: Teacher,
        plan: RoundPlan,
        settings: RoundSettings,
        learner: LearnerSettings,
        on_step: StepCallback = lambda *_: None,
        base_counts: dict[str, AcceptedCounts] | None = None,
    ) -> None:
        """`base_counts`: what earlier rounds have counted for version 0."""
        self.base_counts = {} if base_counts is None else base_counts
        self.folder = folder
        self.plan = plan
        self.settings = settings
        self.target = target = teacher.target
        self.base = teacher.drafter
        self.current = current = teacher.version(folder, plan.parent)
        # Without a share, the parent process stops this one while requests run (throttle.py).
        on_gpu = target.device.type == "cuda"
        share = GPU_TIME_SHARE if learner.time_share is None else learner.time_share
        self.pacer = Pacer(folder, share if on_gpu else 0.0)
        self.round = RoundFolder(folder)
        self.on_step = on_step
        replay = Path(learner.replay).expanduser() if learner.replay else None
        self.data = read_round(self.round, target, settings, replay)
        drafter = continue_drafter(current, target)
        config = train_config(drafter.config, settings, self.round.root, current, target)
        empty = self.data.training.subset(np.arange(0))
        data = TrainingData(self.data.training, empty, drafter.target_ids, 1.0)
        features = cached_features(drafter.config, target, self.data.training)
        self.trainer = Trainer(config, target, data, World(), features, drafter)
        self.saved = time.monotonic()

    def _resume(self) -> None:
        """Continue from the last state; one that is broken or of other settings is given up."""
        try:
            self.trainer.resume()
        except UserError as error:
            append_event(self.folder.events, "failed", f"training begins again: {error}")
            shutil.rmtree(self.trainer.out / "state")

    def run(self) -> VersionRecord | None:
        """Train and judge; None: the job was asked to stop, and its state is saved."""
        self._resume()
        journal = Journal(self.round.root, self.trainer.step, active=False)
        self._report("training")
        self.pacer.begin()
        if not self.trainer.train(journal, self._after_step):
            return None
        steps = self.trainer.step
        append_event(
            self.folder.events,
            "trained",
            f"{steps} steps on {len(self.data.training)} documents",
            documents=len(self.data.training),
            steps=steps,
            seconds=round(self.trainer.seconds, 1),
        )
        self._report("judging")
        return self._keep(self._best_candidate())

    def release(self) -> None:
        """Restore the target's own attention, for the next round."""
        source = self.trainer.features.uncached()
        if isinstance(source, FeatureExtractor):
            source.release()

    def _after_step(self, step: int, total: int, record: StepRecord) -> None:
        self._require_documents()
        self._report("training", record.loss)
        self.on_step(step, total, record.loss)
        if time.monotonic() - self.saved > self.settings.save_seconds and step < total:
            self.trainer.save()
            self.saved = time.monotonic()
        self.pacer.pause()

    def _require_documents(self) -> None:
        """End the round, without a version, if its documents were purged."""
        if not self.round.plan_file.exists():
            raise UserError("the documents of this round were purged: it ends")

    def _report(self, state: TrainerState, loss: float | None = None) -> None:
        trainer = self.trainer
        status = TrainerStatus(
            state, os.getpid(), trainer.step, trainer.total_steps, loss, self.plan.documents
        )
        write_status(self.folder, status)

    def _best_candidate(self) -> Candidate:
        """The first mix that wins; if none does, the one with the longest acceptance length."""
        current = checkpoint.load(self.current, self.target, torch.float32)
        trained = self.trainer.drafter.eval()
        before = self._count(current, self.data.held_back)
        old_before = self._count_base()
        candidates = []
        for mixed in self.settings.mixes:
            drafter = mix_weights(current, trained, mixed)
            candidate = self._judge(drafter, mixed, before, old_before)
            if candidate.verdict.wins:
                return candidate
            candidates.append(candidate)
        return max(candidates, key=lambda candidate: candidate.held_back.after)

    def _count_base(self) -> AcceptedCounts | None:
        """The counts of version 0 on the replay, once for all rounds of a job.

        Version 0 knows the old domains: small losses of many rounds must not add up.
        """
        if "replay" not in self.base_counts:
            base = checkpoint.load(self.base, self.target, torch.float32)
            counts = self._count(base, self.data.replay_held_out)
            if counts is None:
                return None
            self.base_counts["replay"] = counts
        return self.base_counts["replay"]

    def _judge(
        self,
        drafter: Drafter,
        mixed: float,
        before: AcceptedCounts | None,
        old_before: AcceptedCounts | None,
    ) -> Candidate:
        settings = self.settings
        after = self._count(drafter, self.data.held_back)
        assert before is not None and after is not None
        held_back = compare(before, after, settings.k, settings.seed)
        old_after = self._count(drafter, self.data.replay_held_out)
        replay = None
        if old_before is not None and old_after is not None:
            replay = compare(old_before, old_after, settings.k, settings.seed)
        return Candidate(drafter, mixed, held_back, replay, judge(held_back, replay, settings))

    def _count(self, drafter: Drafter, documents: Documents | None) -> AcceptedCounts | None:
        if documents is None:
            return None
        self.pacer.begin()
        return count_accepted(self._replay(drafter), documents, self.settings.k, self.pacer.pause)

    def _replay(self, drafter: Drafter) -> DraftReplay:
        trainer = self.trainer
        return DraftReplay(
            DrafterPasses(drafter, trainer.passes.dtype),
            trainer.features.uncached(),
            trainer.config.pack_tokens,
            trainer.flex,
            group_size=JUDGED_ANCHORS[self.target.device.type],
            logit_rows=JUDGED_ANCHORS[self.target.device.type] * self.settings.k,
        )

    def _keep(self, candidate: Candidate) -> VersionRecord:
        """Write the candidate as a version. A winner stays a candidate until it is promoted."""
        number = next_number(self.folder)
        verdict = candidate.verdict
        calibrate_candidate(candidate.drafter, self._replay(candidate.drafter), self.data.held_back)
        path = version_folder(self.folder, number)
        self._require_documents()
        save_candidate(candidate.drafter, path, self.target)
        record = VersionRecord(
            number=number,
            parent=self.plan.parent,
            time=time.time(),
            method=candidate.drafter.config.method,
            base=self.plan.base,
            state="candidate" if verdict.wins else "rejected",
            reason=verdict.reason,
            documents=self.plan.documents,
            tokens=self.plan.tokens,
            steps=self.trainer.step,
            seconds=round(self.trainer.seconds, 1),
            mixed=candidate.mixed,
            held_back=candidate.held_back,
            replay=candidate.replay,
        )
        write_version(self.folder, record)
        self.round.finish(self.plan)
        kind: EventKind = "judged" if verdict.wins else "rejected"
        append_event(self.folder.events, kind, f"version {number}: {verdict.reason}", number)
        return record


def read_round(
    files: RoundFolder, target: Target, settings: RoundSettings, replay: Path | None
) -> RoundData:
    """The documents of a round, with those of the replay folder."""
    length = document_length(settings, target)
    training = read_documents([files.documents], target, length)
    held_back = read_documents([files.held_back], target, length)
    if replay is None:
        return RoundData(training, held_back, None)
    answers = read_documents([replay], target, length)
    replayed, held_out = split_held_out(answers, REPLAY_HELD_OUT, seed=0)
    tokens = len(training.ids) * settings.replay_share / (1 - settings.replay_share)
    chance = np.random.default_rng([settings.seed, len(training)])
    order = np.concatenate([chance.permutation(len(replayed)) for _ in range(MAX_REPLAYS)])
    count = int(np.searchsorted(np.cumsum(replayed.lengths[order]), tokens))
    chosen = [replayed[i] for i in order[:count].tolist()]
    joined = join_documents([*(training[i] for i in range(len(training))), *chosen])
    return RoundData(joined, held_back, held_out)


def document_length(settings: RoundSettings, target: Target) -> int:
    """Tokens of a document that are read; longer ones are cut."""
    return min(pack_tokens(settings, target), target.context)


def pack_tokens(settings: RoundSettings, target: Target) -> int:
    return settings.pack_tokens or PACK_TOKENS[target.device.type]


def cached_features(
    drafter: DrafterConfig, target: Target, documents: Documents
) -> FeatureSource | None:
    """A cache of the target's features on a CPU, if it is small; None: the trainer decides."""
    source_bytes = (drafter.num_taps + 1) * drafter.target_hidden_size * target.dtype.itemsize
    if target.device.type != "cpu" or len(documents.ids) * source_bytes > MAX_CACHE_BYTES:
        return None
    return CachedFeatures(FeatureExtractor(target, drafter.aux_layer_ids or ()), documents)


def train_config(
    drafter: DrafterConfig, settings: RoundSettings, out: Path, init: Path, target: Target
) -> TrainConfig:
    """A short run at a low learning rate for a drafter of this config."""
    assert drafter.aux_layer_ids is not None
    on_gpu = target.device.type == "cuda"
    tokens = pack_tokens(settings, target)
    return TrainConfig(
        target=str(target.name),
        out=str(out),
        method=drafter.method,
        layers=drafter.num_layers,
        k=drafter.k_trained or DEFAULT_DEPTHS,
        aux_layer_ids=drafter.aux_layer_ids,
        mask_token_id=-1 if drafter.mask_token_id is None else drafter.mask_token_id,
        init=str(init),
        sliding_window=drafter.sliding_window or -1,
        bidirectional=drafter.bidirectional,
        convolution=drafter.convolution,
        refinement=drafter.refinement,
        intermediate_size=drafter.intermediate_size,
        dependency=drafter.dependency,
        confidence=drafter.confidence,
        inject=drafter.inject,
        max_length=tokens,
        pack_tokens=tokens,
        max_anchors=tokens // (2 if on_gpu else 4),
        segments=1 if on_gpu else max(1, tokens // CPU_SEGMENT_TOKENS),
        joined=0.0,  # Documents of different requests never share a context.
        optimizer=settings.optimizer,
        lr=settings.lr,
        warmup=0.1,
        epochs=settings.epochs,
        held_out=0,
        seed=settings.seed,
        log_every=1,
        save_every=0,
        eval_every=0,
        eval_k=settings.k,
    )
