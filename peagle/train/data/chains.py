"""COD sampling (conditional drop-token): which positions get chains, and of which length.

Row layout. A row has an anchor a and a depth k, its RoPE position is a + k, and p = a + k. At depth
0 its inputs are real: the embedding of token p + 1 and the taps g_p. At depth k >= 1 they are the
mask embedding and mask_hidden (P-EAGLE), or the drafter's own output (EAGLE-3). The row predicts
token p + 2, so it is supervised where token p + 2 belongs to an answer of the same document, by the
target's distribution at index p + 1.

COD rule. A chain of length l at anchor a is the rows (a, 0)..(a, l - 1), all of them supervised and
inside the document. Depth k keeps about n * r^k of the n supervised rows, nested: a kept row has
its whole chain. With n = 100 and r = 0.8, depths 1, 2 and 3 keep 80, 64 and 51 rows.

    document of 6 tokens, answer = tokens 2..5:  supervised rows 0 1 2 3, longest chains 4 3 2 1
"""

from dataclasses import dataclass

import numpy as np

MAX_DEPTHS = 64

IntArray = np.ndarray


@dataclass(frozen=True, slots=True)
class Chains:
    """Rows of depth 1 and more, ordered by anchor and then by depth, [R] each."""

    anchor: IntArray
    depth: IntArray
    # bool: the dependency head corrects the row by the draft before it (drafter/dependency.py).
    # None stands for all rows.
    corrected: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.anchor)

    def __getitem__(self, rows: np.ndarray) -> "Chains":
        corrected = None if self.corrected is None else self.corrected[rows]
        return Chains(self.anchor[rows], self.depth[rows], corrected)

    def drop_corrections(self, fraction: float, rng: np.random.Generator) -> "Chains":
        """The same chains, of which a random fraction of the rows is not corrected."""
        return Chains(self.anchor, self.depth, rng.random(len(self)) >= fraction)


NO_CHAINS = Chains(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def max_chain_lengths(doc: IntArray, answer_mask: np.ndarray) -> IntArray:
    """The number of consecutive supervised rows from each position on, [T]; 0 is not supervised."""
    positions = np.arange(len(doc))
    supervised = np.zeros(len(doc), dtype=bool)
    supervised[:-2] = answer_mask[2:].astype(bool) & (doc[2:] == doc[:-2])
    run_ends = np.flatnonzero(~supervised | np.append(doc[1:] != doc[:-1], True))
    next_end = run_ends[np.searchsorted(run_ends, positions)]
    lengths = np.zeros(len(doc), dtype=np.int64)
    lengths[supervised] = (next_end - positions + supervised[next_end])[supervised]
    return lengths


def sample_chains(
    max_lengths: IntArray, k: int, keep: float, rng: np.random.Generator, max_anchors: int = 0
) -> Chains:
    """Sample chains of at most k rows, depth 0 included: depth j gets about n * keep^j anchors.

    Lengths are drawn without replacement from the geometric sequence 1, r, r^2, ..., and then
    limited by `max_lengths`. `max_anchors` limits the anchors that get a chain, chosen at random; 0
    is no limit.
    """
    anchors = np.flatnonzero(max_lengths)
    if max_anchors and len(anchors) > max_anchors:
        anchors = np.sort(rng.choice(anchors, max_anchors, replace=False))
    if not len(anchors):
        return Chains(anchors, anchors)
    rank = (rng.permutation(len(anchors)) + 0.5) / len(anchors)  # evenly spread over (0, 1)
    depths = np.arange(1, k)
    # Nested: rank < r^j implies rank < r^i for i < j.
    deepest = (rank[:, None] < keep**depths).sum(1)
    deepest = np.minimum(deepest, max_lengths[anchors] - 1)
    return _expand(anchors, deepest)


def full_chains(anchors: IntArray, k: int) -> Chains:
    """Every depth 1..k-1 at every anchor, as decoding drafts."""
    return _expand(anchors, np.full(len(anchors), k - 1))


def max_chain_rows(anchors: int, k: int, keep: float) -> int:
    """The largest number of chain rows that `sample_chains` returns for this number of anchors."""
    ranks = (np.arange(anchors) + 0.5) / max(anchors, 1)
    return int(sum((ranks < keep**depth).sum() for depth in range(1, k)))


def _expand(anchors: IntArray, deepest: IntArray) -> Chains:
    """The rows 1..deepest of every anchor."""
    anchor = np.repeat(anchors, deepest)
    first_row = np.repeat(np.cumsum(deepest) - deepest, deepest)
    return Chains(anchor, np.arange(len(anchor)) - first_row + 1)
