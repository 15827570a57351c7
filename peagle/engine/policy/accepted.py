"""How many drafts one step accepted for a request, and how many other shapes would have accepted.

A tree contains the chain of its depth and every smaller tree, so one step of a tree also shows
what those would have accepted of the same drafts.
"""

from collections.abc import Sequence
from typing import NamedTuple


class AcceptedCounts(NamedTuple):
    """The outcome of one step for one request.

    `chain` counts the leading drafts of the chain that match the answer: at most `accepted` + 1,
    because the step shows no more of the answer. `path` has one bit for each accepted row of a
    tree, row 0 (the newest token) included (peagle/kernels/triton/accept_tree.py).

        A tree accepts rows 5 and 17, and the chain fails at its second draft:
        AcceptedCounts(accepted=2, chain=1, path=1 << 0 | 1 << 5 | 1 << 17)
        chain_trials(7) == 2       the chain's first two drafts were decided
        accepted_by_tree(16) == 1  a tree of 16 nodes has row 5, but not row 17
    """

    accepted: int
    chain: int
    path: int = 0

    def chain_trials(self, k: int) -> int:
        """The number of drafts of a chain of length k that the step decided.

        These are the accepted ones and the first rejected one, if the step shows it.
        """
        return self.chain if self.chain > self.accepted else min(self.chain + 1, k)

    def accepted_by_tree(self, nodes: int) -> int:
        """The number of drafts that the tree's first `nodes` nodes alone would have accepted."""
        return (self.path & (2 << nodes) - 1).bit_count() - 1


def accepted_counts(accepted: int, tree_counts: Sequence[int]) -> AcceptedCounts:
    """`tree_counts`: (chain, path) as `accept_tree` packs them; empty if the draft was a chain."""
    if tree_counts:
        return AcceptedCounts(accepted, *tree_counts)
    return AcceptedCounts(accepted, accepted)
