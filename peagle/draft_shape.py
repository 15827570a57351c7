"""Candidate trees: the continuations that one target pass verifies, all branches at once.

A drafter's pass gives, for each of K depths, M candidates with their log-probabilities. The tree holds the `nodes`
continuations that are likeliest to be accepted: a node's probability is the product along its path, so no node is
likelier than its parent, and the likeliest so many always form a tree.

    K=2, M=2, log-probabilities -0.2 -1.8 | -0.3 -1.5, 4 nodes:

    row        0        1      2      3      4
    what       newest   a      ab     ab'    a'
    parent     -        0      1      1      0
    depth      0        1      2      2      1
    sum                 -0.2   -0.5   -1.7   -1.8

Row 0 is the newest token, row i node i - 1; parents come before their children. `masks` has a bit for each row that a
row sees among these: itself and its ancestors. A chain is the tree with as many nodes as depths, one at each.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from peagle.errors import UserError

CANDIDATES_PER_DEPTH = 16  # of a depth
MAX_ADAPTIVE_K = 7  # of automatic K, unless
MAX_ADAPTIVE_K_PARALLEL = 11  # a parallel drafter runs on a GPU, where its rows are nearly free
MAX_TREE_NODES = 62  # with the newest token, as many as a signed word has bits


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The form of what is drafted: nothing (0, 0), a chain (k, k), or a tree of `nodes` in all."""

    k: int
    nodes: int

    def __post_init__(self) -> None:
        if self.nodes != self.k and not (2 <= self.k < self.nodes <= MAX_TREE_NODES):
            raise UserError(
                f"a tree of {self.nodes} nodes and depth {self.k} cannot be had: use more nodes than K,"
                f" K of at least 2, and at most {MAX_TREE_NODES} nodes"
            )

    @property
    def chain(self) -> bool:
        return self.nodes == self.k

    def __str__(self) -> str:
        return f"K={self.k}" if self.chain else f"tree {self.nodes}, K={self.k}"


NO_DRAFT = DraftShape(0, 0)


def check_tree_nodes(
    nodes: int, ks: Iterable[int | str] = (), method: str | None = None, exact: bool | None = False
) -> int:
    """Nodes of a tree (0: chains), as far as it can be told before anything is loaded."""
    if nodes < 0:
        raise UserError(f"--tree is {nodes}: use a number of nodes, or 0 for chains")
    if not nodes:
        return 0
    if method == "none":
        raise UserError("nothing is drafted with --method none: leave out --tree")
    if method == "eagle3":
        raise UserError(
            "eagle3 drafts one token after another: trees need a p-eagle drafter. Leave out --tree"
        )
    if exact:
        raise UserError("exact mode verifies chains: leave out one of --exact and --tree")
    for k in [k for k in ks if k != "auto"] or [MAX_ADAPTIVE_K]:
        if nodes == k:
            raise UserError(
                f"a tree of {nodes} nodes and depth {k} is a chain: use more nodes than K, or leave out --tree"
            )
        DraftShape(int(k), nodes)
    return nodes
