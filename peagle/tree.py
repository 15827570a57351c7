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

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.errors import UserError

CANDIDATES = 16  # of a depth
MOST_NODES = 62  # with the newest token, as many as a signed word has bits


@dataclass(frozen=True, slots=True)
class Tree:
    """The form of what is drafted: nothing (0, 0), a chain (k, k), or a tree of `nodes` in all."""

    k: int
    nodes: int

    def __post_init__(self) -> None:
        if self.nodes != self.k and not (2 <= self.k < self.nodes <= MOST_NODES):
            raise UserError(
                f"a tree of {self.nodes} nodes and depth {self.k} cannot be had: use more nodes than K,"
                f" K of at least 2, and at most {MOST_NODES} nodes"
            )

    @property
    def chain(self) -> bool:
        return self.nodes == self.k

    def __str__(self) -> str:
        return f"K={self.k}" if self.chain else f"tree {self.nodes}, K={self.k}"


NOTHING = Tree(0, 0)


class Grown(NamedTuple):
    """Of each request: rows 1..N are nodes. All on one device."""

    candidate: Tensor  # [B, N] int64: among the M of the node's depth
    parent: Tensor  # [B, N] int32: its row
    depth: Tensor  # [B, N] int32: 1..K
    masks: Tensor  # [B, N + 1] int64


def grow(logp: Tensor, nodes: int) -> Grown:
    """logp [B, K, J, M]: of candidate i at depth k + 1 behind candidate j of the depth before; J = 1 where it does not
    depend on that one. Behind the newest token j is 0. Of equals the one whose parent came first."""
    trees = [_grow(one, nodes) for one in logp.float().cpu()]
    candidate, parent, depth, masks = (torch.tensor([tree[i] for tree in trees]) for i in range(4))
    device = logp.device
    return Grown(candidate.to(device), parent.int().to(device), depth.int().to(device), masks.to(device))


def _grow(logp: Tensor, nodes: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """The definition: of all children of what has been taken, take the likeliest, again and again."""
    k, width, _ = logp.shape
    children = torch.full((nodes + 1, logp.shape[2]), -torch.inf)  # of each row
    children[0] = logp[0, 0]
    candidate, parent, depth, masks = [], [], [0], [1]
    for row in range(1, nodes + 1):
        at = int(children.argmax())
        above, chosen = divmod(at, logp.shape[2])
        total = float(children[above, chosen])
        children[above, chosen] = -torch.inf
        candidate.append(chosen)
        parent.append(above)
        depth.append(depth[above] + 1)
        masks.append(masks[above] | 1 << row)
        if depth[row] < k:
            children[row] = total + logp[depth[row], chosen if width > 1 else 0]
    return candidate, parent, depth[1:], masks
