"""COD sampling (conditional drop-token): which positions get a chain of deeper rows, and how long it is.

Row p (depth 0: real inputs x_{p+1} and g_p; depth k: p = anchor + k) predicts token p + 2, so it is supervised where
token p + 2 belongs to an answer of the same document. A chain of length l at anchor a is the rows (a, 0)..(a, l - 1),
all of them supervised, none outside the document. Depth k keeps about n * r^k of the n supervised rows, nested: a kept
row has its whole chain.

    document of 6 tokens, answer = tokens 2..5:  supervised rows 0 1 2 3, room 4 3 2 1
"""

from dataclasses import dataclass

import numpy as np

Ints = np.ndarray


@dataclass(frozen=True, slots=True)
class Chains:
    """Rows of depth 1 and more, by anchor and then by depth, [R] each."""

    anchor: Ints
    depth: Ints
    told: Ints | None = (
        None  # bool: the row is told the draft before it (drafter/dependency.py); None: all are
    )

    def __len__(self) -> int:
        return len(self.anchor)

    def __getitem__(self, at: Ints) -> "Chains":
        return Chains(self.anchor[at], self.depth[at], None if self.told is None else self.told[at])

    def dropped(self, share: float, rng: np.random.Generator) -> "Chains":
        """A random share of the rows is told nothing."""
        return Chains(self.anchor, self.depth, rng.random(len(self)) >= share)


def room_of(doc: Ints, answer: Ints) -> Ints:
    """[T]: how many supervised rows follow each other from this position on, itself included; 0: not supervised."""
    supervised = np.zeros(len(doc), dtype=bool)
    supervised[:-2] = answer[2:].astype(bool) & (doc[2:] == doc[:-2])
    room = np.zeros(len(doc), dtype=np.int64)
    ends = np.flatnonzero(~supervised | np.append(doc[1:] != doc[:-1], True))  # a run ends here
    after = ends[np.searchsorted(ends, np.arange(len(doc)))]
    room[supervised] = (after - np.arange(len(doc)) + supervised[after])[supervised]
    return room


def sample_chains(
    room: Ints, k: int, keep: float, rng: np.random.Generator, max_anchors: int = 0
) -> Chains:
    """Chain lengths are drawn without replacement from the ladder 1, r, r^2, ...: depth j gets n * r^j anchors.

    `max_anchors` caps the anchors that get a chain at all, chosen at random; 0: no cap.
    """
    anchors = np.flatnonzero(room)
    if max_anchors and len(anchors) > max_anchors:
        anchors = np.sort(rng.choice(anchors, max_anchors, replace=False))
    if not len(anchors):
        return Chains(anchors, anchors)
    rank = (rng.permutation(len(anchors)) + 0.5) / len(anchors)  # uniform in (0, 1), evenly spread
    depths = np.arange(1, k)
    deepest = (rank[:, None] < keep**depths).sum(
        1
    )  # nested: rank < r^j implies rank < r^i for i < j
    deepest = np.minimum(deepest, room[anchors] - 1)
    return _rows(anchors, deepest)


def full_chains(anchors: Ints, k: int) -> Chains:
    """Every depth 1..k-1 at every anchor: what decoding drafts."""
    return _rows(anchors, np.full(len(anchors), k - 1))


def most_rows(anchors: int, k: int, keep: float) -> int:
    """The largest number of chain rows `sample_chains` can return for so many anchors."""
    ranks = (np.arange(anchors) + 0.5) / max(anchors, 1)
    return int(sum((ranks < keep**depth).sum() for depth in range(1, k)))


def _rows(anchors: Ints, deepest: Ints) -> Chains:
    anchor = np.repeat(anchors, deepest)
    first = np.repeat(np.cumsum(deepest) - deepest, deepest)
    return Chains(anchor, np.arange(len(anchor)) - first + 1)
