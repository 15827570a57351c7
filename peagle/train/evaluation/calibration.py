"""Calibration of a drafter's probabilities, measured on held-out answers.

The distribution of a row at depth k, given that the drafts before it were accepted, is the softmax
of its logits times a factor of that depth. With a dependency head the logits of the row's
candidates are corrected. The factor is the one under which the tokens that really follow are most
likely. One pass over the rows scores a grid of factors; the log-likelihood is concave in the
factor, so a parabola through the best three points ends the search.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

from peagle.draft_shape import CANDIDATES_PER_DEPTH
from peagle.drafter import Drafter
from peagle.train.data.documents import Documents
from peagle.train.data.pack import PackedDocuments
from peagle.train.evaluation.acceptance import AnchorDrafts, DraftReplay
from peagle.train.evaluation.replay import expected_tokens

MAX_ROWS_PER_DEPTH = 4096
MIN_ROWS_PER_DEPTH = 50  # With fewer rows, a depth uses the factor of the depth before.
FACTOR_GRID = torch.logspace(-1.5, 1.5, 31, base=2)  # 0.35 to 2.83
LOGIT_ROWS = 1024  # rows that have logits at once
RELIABILITY_BINS = 10


class DepthRows(NamedTuple):
    """Rows of one depth whose drafts before were all accepted, [n, ...] each."""

    normed: Tensor  # [n, d]
    previous: Tensor  # [n] target id of the token before
    expected: Tensor  # [n] draft id of the token that follows; -1: outside the draft vocabulary


class Bin(NamedTuple):
    """Rows with similar predicted probabilities."""

    predicted: float  # mean of the predicted probabilities
    right: float  # fraction of the rows whose draft was right
    rows: int


@dataclass(frozen=True, slots=True)
class Reliability:
    """The predicted probability of each row's best draft and whether it was right, [n] each."""

    depth: np.ndarray
    plain: np.ndarray  # the drafter's probability
    scaled: np.ndarray  # the probability with the factor of the depth
    confidence: np.ndarray | None  # of the confidence output
    right: np.ndarray

    def card_rows(self) -> dict[str, str]:
        """The rows of the model card."""
        kinds = {
            "plain": self.plain,
            "calibrated": self.scaled,
            "confidence output": self.confidence,
        }
        known = {name: predicted for name, predicted in kinds.items() if predicted is not None}
        brier = ", ".join(
            f"{name} {np.mean((predicted - self.right) ** 2):.4f}"
            for name, predicted in known.items()
        )
        error = ", ".join(
            f"{name} {calibration_error(predicted, self.right):.4f}"
            for name, predicted in known.items()
        )
        return {
            "Brier score of the best draft": brier,
            "expected calibration error": f"{error} ({len(self.right):,} held-out rows)",
        }


class Calibration(NamedTuple):
    factors: tuple[float, ...]  # of each depth
    reliability: Reliability


def calibrate(
    replay: DraftReplay, documents: Documents, k: int, logit_rows: int = LOGIT_ROWS
) -> Calibration:
    """Fit the factor of each depth and measure the reliability with and without the factors."""
    drafter = replay.passes.drafter
    factors: list[float] = []
    parts: list[Reliability] = []
    for depth, rows in enumerate(collect_rows(replay, documents, k)):
        if int((rows.expected >= 0).sum()) >= MIN_ROWS_PER_DEPTH:
            factors.append(fit_factor(drafter, rows, depth, logit_rows))
        else:
            factors.append(factors[-1] if factors else 1.0)
        parts.append(measure_reliability(drafter, rows, depth, factors[-1], logit_rows))
    confidences = [part.confidence for part in parts if part.confidence is not None]
    reliability = Reliability(
        depth=np.concatenate([part.depth for part in parts]),
        plain=np.concatenate([part.plain for part in parts]),
        scaled=np.concatenate([part.scaled for part in parts]),
        confidence=np.concatenate(confidences) if confidences else None,
        right=np.concatenate([part.right for part in parts]),
    )
    return Calibration(tuple(round(factor, 4) for factor in factors), reliability)


def collect_rows(replay: DraftReplay, documents: Documents, k: int) -> list[DepthRows]:
    """The rows of each depth, from as many packs as are needed."""
    by_depth: list[list[DepthRows]] = [[] for _ in range(k)]
    for packed in replay.packs(documents):
        for group in replay.anchor_drafts(packed, k):
            for depth, rows in enumerate(accepted_rows(replay.passes.drafter, packed, group)):
                by_depth[depth].append(rows)
        counts = [sum(len(rows.expected) for rows in parts) for parts in by_depth]
        if min(counts) >= MAX_ROWS_PER_DEPTH:
            break
    return [
        DepthRows(*(torch.cat(part)[:MAX_ROWS_PER_DEPTH] for part in zip(*rows, strict=True)))
        for rows in by_depth
    ]


def accepted_rows(
    drafter: Drafter, packed: PackedDocuments, group: AnchorDrafts
) -> Iterator[DepthRows]:
    """Depth after depth, the rows whose drafts before were all accepted.

    Row (a, k) drafts token a + k + 2; the token before is a + k + 1.
    """
    anchors, normed, drafts = group
    device = normed.device
    k = normed.shape[1]
    draft_ids = torch.full((drafter.config.vocab_size,), -1, device=device)
    own = torch.arange(drafter.config.draft_vocab_size, device=device)
    draft_ids[own if drafter.target_ids is None else drafter.target_ids] = own
    expected = torch.from_numpy(expected_tokens(packed, anchors, k)).to(device)
    accepted = torch.ones(len(anchors), dtype=torch.bool, device=device)
    for depth in range(k):
        token = expected[:, depth]
        accepted = accepted & (token >= 0)
        positions = np.minimum(anchors + depth + 2, len(packed.ids) - 1)
        previous = torch.from_numpy(packed.ids[positions - 1]).to(device)
        yield DepthRows(normed[accepted, depth], previous[accepted], draft_ids[token[accepted]])
        accepted = accepted & (drafts[:, depth] == token)


def corrected_logits(drafter: Drafter, rows: DepthRows, depth: int) -> Tensor:
    """[n, draft vocabulary]; the logits of the candidates are corrected by the token before."""
    logits = drafter.logits(rows.normed.to(drafter.head_dtype)).float()
    if drafter.dependency is None or depth == 0:
        return logits
    ids = logits.topk(min(CANDIDATES_PER_DEPTH, logits.shape[1])).indices
    corrected = drafter.logits(apply_dependency(drafter, rows).to(drafter.head_dtype)).float()
    return logits.scatter(1, ids, corrected.gather(1, ids))


def apply_dependency(drafter: Drafter, rows: DepthRows) -> Tensor:
    """The rows corrected by the token before, [n, d]."""
    assert drafter.dependency is not None
    dtype = drafter.dependency.out.weight.dtype
    return drafter.dependency(
        rows.normed.to(dtype), embedding(rows.previous, drafter.embed_tokens).to(dtype)
    )


def split_rows(rows: DepthRows, size: int) -> Iterator[DepthRows]:
    for part in zip(*(x.split(size) for x in rows), strict=True):
        yield DepthRows(*part)


@torch.no_grad()
def fit_factor(
    drafter: Drafter, rows: DepthRows, depth: int, logit_rows: int = LOGIT_ROWS
) -> float:
    """The factor under which the expected tokens are most likely."""
    losses = torch.zeros(len(FACTOR_GRID), dtype=torch.float64)
    inside = rows.expected >= 0
    for part in split_rows(DepthRows(*(x[inside] for x in rows)), logit_rows):
        logits = corrected_logits(drafter, part, depth)
        own = logits.gather(1, part.expected[:, None])[:, 0]
        for i, factor in enumerate(FACTOR_GRID.tolist()):
            losses[i] += float(((factor * logits).logsumexp(-1) - factor * own).double().sum())
    best = min(max(int(losses.argmin()), 1), len(FACTOR_GRID) - 2)
    left, middle, right = losses[best - 1 : best + 2].tolist()
    curvature = left - 2 * middle + right
    shift = max(-1.0, min(1.0, 0.5 * (left - right) / curvature)) if curvature > 0 else 0.0
    return float(FACTOR_GRID[best] * (FACTOR_GRID[1] / FACTOR_GRID[0]) ** shift)


@torch.no_grad()
def measure_reliability(
    drafter: Drafter, rows: DepthRows, depth: int, factor: float, logit_rows: int = LOGIT_ROWS
) -> Reliability:
    """The reliability of the rows of one depth."""
    plain, scaled, right, confidence = [], [], [], []
    for part in split_rows(rows, logit_rows):
        logits = corrected_logits(drafter, part, depth)
        best = logits.max(-1)
        log_prob = best.values - logits.logsumexp(-1)
        plain.append(log_prob.exp())
        scaled.append((factor * best.values - (factor * logits).logsumexp(-1)).exp())
        right.append((best.indices == part.expected).float())
        if drafter.confidence is not None:
            corrected = depth > 0 and drafter.dependency is not None
            normed = apply_dependency(drafter, part) if corrected else part.normed
            dtype = drafter.confidence.weight.dtype
            confidence.append(drafter.confidence_logits(normed.to(dtype), log_prob).sigmoid())
    probs = torch.cat(plain).cpu().numpy()
    return Reliability(
        depth=np.full(len(probs), depth),
        plain=probs,
        scaled=torch.cat(scaled).cpu().numpy(),
        confidence=torch.cat(confidence).cpu().numpy() if confidence else None,
        right=torch.cat(right).cpu().numpy(),
    )


def calibration_error(predicted: np.ndarray, right: np.ndarray) -> float:
    """The mean difference between predicted and right fractions, over equal bins of predictions."""
    bins = reliability_bins(predicted, right)
    return sum(b.rows * abs(b.predicted - b.right) for b in bins) / max(len(predicted), 1)


def reliability_bins(predicted: np.ndarray, right: np.ndarray) -> list[Bin]:
    """Equal bins of the predicted probabilities, without empty ones."""
    numbers = np.minimum((predicted * RELIABILITY_BINS).astype(int), RELIABILITY_BINS - 1)
    masks = [numbers == i for i in range(RELIABILITY_BINS)]
    return [
        Bin(float(predicted[mask].mean()), float(right[mask].mean()), int(mask.sum()))
        for mask in masks
        if mask.any()
    ]
