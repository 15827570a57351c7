"""What a step kept of one request's drafts, and what other forms would have kept of the same ones."""

from collections.abc import Sequence
from typing import NamedTuple


class AcceptedCounts(NamedTuple):
    kept: int
    chain: int  # leading drafts of the chain that hold: at most kept + 1, for the step shows no more of the answer
    path: int = 0  # of a tree: a bit for each row that was kept, the newest token's among them (kernels/walk.py)

    def tried(self, k: int) -> int:
        """So many drafts of a chain of k were decided about: up to the first that fails, if the step shows it."""
        return self.chain if self.chain > self.kept else min(self.chain + 1, k)

    def by(self, nodes: int) -> int:
        """What a tree of so many nodes would have kept, if it is no larger than the one that ran."""
        return (self.path & (2 << nodes) - 1).bit_count() - 1


def accepted_counts(kept: int, tree: Sequence[int]) -> AcceptedCounts:
    """`tree`: what `walk` packs for one; of a chain nothing."""
    return AcceptedCounts(kept, *tree) if tree else AcceptedCounts(kept, kept)
