"""Whether a candidate is better than the current drafter, on answers that neither was trained on.

Both drafters are replayed along the same answers (train/evaluation/replay.py), so the comparison
is paired. A bootstrap over documents gives the interval of the ratio of their acceptance lengths:
documents are drawn with replacement, and both lengths are computed from the same draw.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from peagle.learn.training.round_settings import RoundSettings
from peagle.learn.versions import LengthComparison
from peagle.train.data.documents import Documents
from peagle.train.evaluation.acceptance import DraftReplay
from peagle.train.evaluation.replay import chain_matches, replay_by_document

RESAMPLES = 2000
CONFIDENCE = 0.95


class AcceptedCounts(NamedTuple):
    """Accepted drafts and steps of every document, [D] each."""

    accepted: np.ndarray
    steps: np.ndarray

    @property
    def length(self) -> float:
        return 1 + float(self.accepted.sum()) / max(float(self.steps.sum()), 1.0)


class Verdict(NamedTuple):
    wins: bool
    reason: str


def count_accepted(
    replay: DraftReplay, documents: Documents, k: int, pause: Callable[[], None] = lambda: None
) -> AcceptedCounts:
    """Replay chains of K drafts along every document; `pause` is called after each pack."""
    accepted = np.zeros(len(documents))
    steps = np.zeros(len(documents))
    first = 0
    for packed in replay.packs(documents):
        anchors, drafts = replay.draft(packed, k)
        matches = chain_matches(packed, anchors, drafts, k)
        for number, taken in replay_by_document(packed, anchors, matches, k).items():
            accepted[first + number] = sum(step.accepted for step in taken)
            steps[first + number] = len(taken)
        first += len(packed.lengths)
        pause()
    return AcceptedCounts(accepted, steps)


def compare(
    before: AcceptedCounts, after: AcceptedCounts, k: int, seed: int = 0
) -> LengthComparison:
    """Compare the lengths of two drafters on the same documents."""
    count = len(before.steps)
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, count, (RESAMPLES, count))  # document numbers
    ratios = _drawn_lengths(after, draws) / _drawn_lengths(before, draws)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return LengthComparison(
        k=k,
        documents=count,
        before=round(before.length, 4),
        after=round(after.length, 4),
        low=round(float(low), 4),
        high=round(float(high), 4),
    )


def _drawn_lengths(counts: AcceptedCounts, draws: np.ndarray) -> np.ndarray:
    """draws [B, D] -> the acceptance length of each draw, [B]."""
    return 1 + counts.accepted[draws].sum(1) / np.maximum(counts.steps[draws].sum(1), 1)


def judge(
    held_back: LengthComparison, replay: LengthComparison | None, settings: RoundSettings
) -> Verdict:
    """The verdict on a candidate; its reason is for a reader."""
    if held_back.documents < settings.min_held_back:
        return Verdict(
            False,
            f"only {held_back.documents} held-back answers, {settings.min_held_back} are needed",
        )
    measured = (
        f"acceptance length {held_back.before:.3f} -> {held_back.after:.3f} on"
        f" {held_back.documents} held-back answers (ratio {held_back.low:.3f} to"
        f" {held_back.high:.3f})"
    )
    if held_back.low <= 1 + settings.margin:
        return Verdict(False, f"{measured}: the interval does not exceed {1 + settings.margin:g}")
    if replay is not None and replay.ratio < settings.min_replay_ratio:
        return Verdict(
            False,
            f"{measured}, but on replayed answers {replay.before:.3f} -> {replay.after:.3f},"
            f" below {settings.min_replay_ratio:g} x",
        )
    return Verdict(True, measured)
