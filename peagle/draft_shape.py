"""Draft shapes: how many tokens are drafted, and whether they form a chain or a tree.

One drafter pass gives, for each of K depths, M candidate tokens with their log-probabilities. A
tree holds the `nodes` continuations that are most likely to be accepted, and one target pass
verifies all branches at once. The probability of a node is the product along its path, so no node
is more likely than its parent, and the most likely nodes always form a tree.

    K=2, M=2, log-probabilities -0.2 -1.8 | -0.3 -1.5, 4 nodes:

    row        0        1      2      3      4
    token      newest   a      ab     ab'    a'
    parent     -        0      1      1      0
    depth      0        1      2      2      1
    sum                 -0.2   -0.5   -1.7   -1.8

Row 0 is the newest token, row i is node i - 1; parents come before their children. `masks` has one
bit for each row that a row attends to among these: itself and its ancestors. A chain is the tree
with one node at each depth.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from peagle.errors import UserError

CANDIDATES_PER_DEPTH = 16
MAX_ADAPTIVE_K = 7  # Default limit of K in adaptive drafting.
# The same limit for a parallel drafter on a GPU, where extra draft rows are nearly free.
MAX_ADAPTIVE_K_PARALLEL = 11
# Prompt lookup: the fewest and the most tokens that are matched (peagle/reference/ngram.py).
MIN_NGRAM = 2
MAX_NGRAM = 8
# The same limit of K for drafts by prompt lookup, which cost no drafter pass.
MAX_ADAPTIVE_K_NGRAM = 15
MIN_WINDOW = 64  # A sliding window holds all rows of a chain, in training and in serving.
# One bit per row in a signed 64-bit mask: the nodes, the newest token, and the sign bit.
MAX_TREE_NODES = 62


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The shape of a draft: no draft (0, 0), a chain (k, k), or a tree of depth k with `nodes`."""

    k: int
    nodes: int

    def __post_init__(self) -> None:
        if not self.is_chain:
            check_tree_size(self.k, self.nodes)

    @property
    def is_chain(self) -> bool:
        """Whether there is one node per depth. No draft counts as a chain of length 0."""
        return self.nodes == self.k

    def as_chain(self) -> "DraftShape":
        """A chain of the same depth."""
        return DraftShape(self.k, self.k)

    def __str__(self) -> str:
        return f"K={self.k}" if self.is_chain else f"tree {self.nodes}, K={self.k}"


NO_DRAFT = DraftShape(0, 0)


def check_tree_size(k: int, nodes: int) -> None:
    """Raise unless a tree of depth k can have this many nodes."""
    if nodes == k:
        raise UserError(
            f"a tree of {nodes} nodes and depth {k} is a chain: use more nodes than K,"
            " or leave out `tree`"
        )
    if not 2 <= k < nodes <= MAX_TREE_NODES:
        raise UserError(
            f"a tree of {nodes} nodes and depth {k} is not supported: use more nodes than K,"
            f" K of at least 2, and at most {MAX_TREE_NODES} nodes"
        )


def check_tree_support(method: str | None) -> None:
    """Raise unless this method can draft trees. None: not known yet."""
    if method == "none":
        raise UserError("nothing is drafted with `method` none: leave out `tree`")
    if method == "ngram":
        raise UserError(
            "ngram drafts one continuation: trees need a p-eagle drafter. Leave out `tree`"
        )
    if method == "eagle3":
        raise UserError(
            "eagle3 drafts one token after another: trees need a p-eagle drafter. Leave out `tree`"
        )


def check_tree_nodes(nodes: int, ks: Iterable[int | str] = (), method: str | None = None) -> int:
    """Check the number of tree nodes (0: chains) before any model is loaded, and return it.

    `ks`: every K that will be drafted; "auto" and no K at all count as the default limit of
    adaptive drafting.
    """
    if nodes < 0:
        raise UserError(f"`tree` is {nodes}: use a number of nodes, or 0 for chains")
    if not nodes:
        return 0
    check_tree_support(method)
    for k in [k for k in ks if k != "auto"] or [MAX_ADAPTIVE_K]:
        check_tree_size(int(k), nodes)
    return nodes


def check_window(window: int | None, name: str) -> None:
    """Check the sliding window of a drafter, called `name`."""
    if window is not None and window < MIN_WINDOW:
        raise UserError(f"`{name}` is {window}: use {MIN_WINDOW} positions or more, or no window")
