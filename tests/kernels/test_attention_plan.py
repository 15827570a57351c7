"""How batch-invariant attention divides its work."""

import pytest
import torch

pytest.importorskip("triton")

from peagle.draft_shape import MAX_TREE_NODES
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.batch_invariant.attention_plan import tree_sizes
from peagle.kernels.triton.batch_invariant.tree_lanes import most_lanes


@pytest.mark.parametrize("d", [64, 80, 128])
@pytest.mark.parametrize("depth", [0, 7, 48, MAX_TREE_NODES])
def test_a_row_of_a_tree_fits(d: int, depth: int) -> None:
    """With a depth of 0, which means unknown, a tree may be a chain of all its rows."""
    rows = MAX_TREE_NODES + 1
    zeros = torch.zeros(rows, dtype=torch.int64)
    tree = RowPass(zeros, zeros, zeros[None].int(), *(zeros[:1].int(),) * 3, rows, 64)
    tree.tree_masks = zeros
    tree.tree_depth = depth
    sizes = tree_sizes(tree, d, 1)
    assert sizes["BLOCK_LANES"] >= most_lanes(depth or MAX_TREE_NODES)
