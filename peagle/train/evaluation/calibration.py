"""Calibration: how far a drafter's probabilities can be believed, measured on held-out answers, and put right.

The distribution of a row at depth k, given that the drafts before it were right, is the softmax of its logits times a
factor of that depth; the logits of its candidates are corrected where there is a dependency, the rest are not. The
factor is the one under which the tokens that really follow are likeliest. One pass over the rows scores a grid of
factors; the log-likelihood is concave in the factor, so a parabola through the best three ends the search.
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
from peagle.train.data.documents import Documents, fill, packed
from peagle.train.data.pack import Pack
from peagle.train.evaluation.acceptance import rows_everywhere
from peagle.train.features.features import AnyFeatures
from peagle.train.objective.passes import Passes

MOST = 4096  # rows of a depth
FEWEST = 50  # with fewer, a depth takes the factor before its own
GRID = torch.logspace(-1.5, 1.5, 31, base=2)  # 0.35 to 2.83
PIECE = 1024  # rows that have logits at once
BINS = 10


class Rows(NamedTuple):
    """Rows of one depth whose drafts before were right, [n, ...] each."""

    normed: Tensor  # [n, d]
    before: Tensor  # the token before, as the target's id
    wanted: Tensor  # the token that really follows, in the draft vocabulary; -1: it is not there


@dataclass(frozen=True, slots=True)
class Reliability:
    """What was predicted of the best draft of each row, and what came of it, [n] each."""

    depth: np.ndarray
    plain: np.ndarray  # its probability, as the drafter says
    scaled: np.ndarray  # with the factor
    confidence: np.ndarray | None
    right: np.ndarray

    def told(self) -> dict[str, str]:
        """For the card."""
        kinds = {
            "plain": self.plain,
            "calibrated": self.scaled,
            "confidence output": self.confidence,
        }
        known = {name: said for name, said in kinds.items() if said is not None}
        brier = ", ".join(
            f"{name} {np.mean((said - self.right) ** 2):.4f}" for name, said in known.items()
        )
        error = ", ".join(
            f"{name} {calibration_error(said, self.right):.4f}" for name, said in known.items()
        )
        return {
            "Brier score of the best draft": brier,
            "expected calibration error": f"{error} ({len(self.right):,} held-out rows)",
        }


def calibrated(
    passes: Passes,
    features: AnyFeatures,
    documents: Documents,
    k: int,
    tokens: int,
    flex: bool = False,
) -> tuple[tuple[float, ...], Reliability]:
    """(the factor of each depth, how reliable probabilities are with and without them)"""
    drafter, parts = passes.drafter, []
    factors: list[float] = []
    for depth, rows in enumerate(collected(passes, features, documents, k, tokens, flex)):
        enough = int((rows.wanted >= 0).sum()) >= FEWEST
        factors.append(fitted(drafter, rows, depth) if enough else factors[-1] if factors else 1.0)
        parts.append(reliability(drafter, rows, depth, factors[-1]))
    joined = (
        np.concatenate(part) if part[0] is not None else None for part in zip(*parts, strict=True)
    )
    return tuple(round(factor, 4) for factor in factors), Reliability(*joined)  # type: ignore[arg-type]


def collected(
    passes: Passes, features: AnyFeatures, documents: Documents, k: int, tokens: int, flex: bool
) -> list[Rows]:
    """Of each depth, from packs until there are enough of them."""
    found: list[list[Rows]] = [[] for _ in range(k)]
    for chosen in fill(documents, np.arange(len(documents)), tokens):
        one = packed(documents, chosen, tokens)
        for anchors, normed, drafts in rows_everywhere(passes, features, one, k, flex):
            for depth, rows in enumerate(
                right_so_far(passes.drafter, one, anchors, normed, drafts)
            ):
                found[depth].append(rows)
        if all(sum(len(rows.wanted) for rows in part) >= MOST for part in found):
            break
    return [Rows(*(torch.cat(part)[:MOST] for part in zip(*rows, strict=True))) for rows in found]


def right_so_far(
    drafter: Drafter, one: Pack, anchors: np.ndarray, normed: Tensor, drafts: Tensor
) -> Iterator[Rows]:
    """Depth after depth. Row (a, k) drafts token a + k + 2; the one before is token a + k + 1."""
    device = normed.device
    draft_ids = torch.full((drafter.config.vocab_size,), -1, device=device)
    own = torch.arange(drafter.config.draft_vocab_size, device=device)
    draft_ids[own if drafter.target_ids is None else drafter.target_ids] = own
    left = torch.ones(len(anchors), dtype=torch.bool, device=device)
    for depth in range(normed.shape[1]):
        place = np.minimum(anchors + depth + 2, len(one.ids) - 1)
        known = (
            one.answer[place]
            & (one.doc[place] == one.doc[anchors])
            & (anchors + depth + 2 < len(one.ids))
        )
        left = left & torch.from_numpy(known).to(device)
        token, before = (torch.from_numpy(one.ids[at]).to(device) for at in (place, place - 1))
        yield Rows(normed[left, depth], before[left], draft_ids[token[left]])
        left = left & (drafts[:, depth] == token)


def scores(drafter: Drafter, rows: Rows, depth: int) -> Tensor:
    """[n, draft vocabulary]: logits, those of the candidates corrected by the token before."""
    logits = drafter.logits(rows.normed.to(drafter.lm_head.dtype)).float()
    if drafter.dependency is None or depth == 0:
        return logits
    ids = logits.topk(min(CANDIDATES_PER_DEPTH, logits.shape[1])).indices
    corrected = drafter.logits(told_before(drafter, rows).to(drafter.lm_head.dtype)).float()
    return logits.scatter(1, ids, corrected.gather(1, ids))


def told_before(drafter: Drafter, rows: Rows) -> Tensor:
    assert drafter.dependency is not None
    dtype = drafter.dependency.out.weight.dtype
    return drafter.dependency(
        rows.normed.to(dtype), embedding(rows.before, drafter.embed_tokens).to(dtype)
    )


def pieces(rows: Rows) -> Iterator[Rows]:
    for part in zip(*(x.split(PIECE) for x in rows), strict=True):
        yield Rows(*part)


@torch.no_grad()
def fitted(drafter: Drafter, rows: Rows, depth: int) -> float:
    """The factor under which `wanted` is likeliest."""
    losses = torch.zeros(len(GRID), dtype=torch.float64)
    inside = rows.wanted >= 0
    for part in pieces(Rows(*(x[inside] for x in rows))):
        logits = scores(drafter, part, depth)
        own = logits.gather(1, part.wanted[:, None])[:, 0]
        for i, factor in enumerate(GRID.tolist()):
            losses[i] += float(((factor * logits).logsumexp(-1) - factor * own).double().sum())
    best = min(max(int(losses.argmin()), 1), len(GRID) - 2)
    left, middle, right = losses[best - 1 : best + 2].tolist()
    bend = left - 2 * middle + right
    shift = max(-1.0, min(1.0, 0.5 * (left - right) / bend)) if bend > 0 else 0.0
    return float(GRID[best] * (GRID[1] / GRID[0]) ** shift)


@torch.no_grad()
def reliability(
    drafter: Drafter, rows: Rows, depth: int, factor: float
) -> tuple[np.ndarray | None, ...]:
    """(depth, plain, scaled, confidence or None, right) of the rows, [n] each."""
    plain, scaled, right, said = [], [], [], []
    for part in pieces(rows):
        logits = scores(drafter, part, depth)
        best = logits.max(-1)
        sure = best.values - logits.logsumexp(-1)
        plain.append(sure.exp())
        scaled.append((factor * best.values - (factor * logits).logsumexp(-1)).exp())
        right.append((best.indices == part.wanted).float())
        if drafter.confidence is not None:
            normed = (
                told_before(drafter, part)
                if depth and drafter.dependency is not None
                else part.normed
            )
            said.append(
                drafter.confidence_logits(
                    normed.to(drafter.confidence.weight.dtype), sure
                ).sigmoid()
            )
    one, two, three = (torch.cat(x).cpu().numpy() for x in (plain, scaled, right))
    confidence = torch.cat(said).cpu().numpy() if said else None
    return np.full(len(one), depth), one, two, confidence, three


def calibration_error(said: np.ndarray, right: np.ndarray) -> float:
    """The mean gap between what was said and what came, over equal bins of what was said."""
    return sum(count * abs(mean - share) for mean, share, count in binned(said, right)) / max(
        len(said), 1
    )


def binned(said: np.ndarray, right: np.ndarray) -> list[tuple[float, float, int]]:
    """(mean of what was said, share that was right, rows) of each bin that holds any."""
    bins = np.minimum((said * BINS).astype(int), BINS - 1)
    inside = [bins == i for i in range(BINS)]
    return [
        (float(said[b].mean()), float(right[b].mean()), int(b.sum())) for b in inside if b.any()
    ]
