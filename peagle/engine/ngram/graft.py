"""An n-gram draft as a branch of a draft tree (peagle/draft_shape.py), in place of its last nodes.

The branch shares the nodes that the tree has already. The node of depth d that it does not share
takes the place of node N - K + d - 1 of N, so that only the least likely nodes make room, and none
that has a child left.

    K=3, 5 nodes, n-gram a c d:

    node       0   1    2    3    4            node       0   1    2    3    4
    token      a   b    b    e    a            token      a   b    b    c    d
    parent     0   1    0    2    3     ->     parent     0   1    0    1    4
    depth      1   2    1    3    2            depth      1   2    1    2    3

Plain PyTorch operations of a fixed shape, which a CUDA graph can hold.
"""

import torch
from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.kernels.triton.build_tree import DraftTrees


def graft_branch(
    trees: DraftTrees, index: Tensor, drafts: Tensor, used: Tensor, shape: DraftShape
) -> None:
    """Add the drafts [B, >= K] to the trees of the slots `index` [B] where `used` [B]."""
    count = shape.nodes
    nodes = trees.nodes[index, :count]  # [B, N]
    parents = trees.parents[index, :count]
    depths = trees.depths[index, :count]
    masks = trees.masks[index, : count + 1]  # [B, N + 1], of rows
    row = torch.zeros_like(index)  # [B] the last row of the branch; row i is node i - 1
    shares = used.clone()  # [B] whether all nodes so far are the tree's own
    columns = torch.arange(count, device=index.device)
    for depth in range(shape.k):
        place = count - shape.k + depth
        token = drafts[:, depth]
        own = (parents == row[:, None]) & (nodes == token[:, None]) & (columns <= place)
        shares = shares & own.any(1)
        own_row = own.int().argmax(1) + 1
        adds = used & ~shares
        mask = masks.gather(1, row[:, None])[:, 0] | (1 << place + 1)
        nodes[:, place] = torch.where(adds, token, nodes[:, place])
        parents[:, place] = torch.where(adds, row.to(parents.dtype), parents[:, place])
        depths[:, place] = torch.where(adds, depth + 1, depths[:, place]).to(depths.dtype)
        masks[:, place + 1] = torch.where(adds, mask, masks[:, place + 1])
        row = torch.where(shares, own_row, place + 1)
    trees.nodes[index, :count] = nodes
    trees.parents[index, :count] = parents
    trees.depths[index, :count] = depths
    trees.masks[index, : count + 1] = masks
