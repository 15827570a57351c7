"""How batch-invariant attention divides its work."""

import random
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from peagle.draft_shape import MAX_TREE_NODES
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.batch_invariant.attention_plan import AttentionPlan, tail_sizes
from peagle.kernels.triton.batch_invariant.tree_lanes import TreeLanes, depth_first, reference

PAGE = 16


def tree_pass(parents: list[int], first: int, depth: int) -> RowPass:
    masks: list[int] = []
    for row, parent in enumerate(parents):
        masks.append(1 if parent < 0 else masks[parent] | 1 << row)
    positions = torch.tensor([first + mask.bit_count() - 1 for mask in masks])
    table = torch.arange((first + len(masks)) // PAGE + 1, dtype=torch.int32)[None]
    start, count, root = (torch.tensor([x], dtype=torch.int32) for x in (0, len(masks), first))
    rows = RowPass(positions, positions, table, start, count, root, len(masks), PAGE)
    rows.tree_masks = torch.tensor(masks)
    rows.tree_depth = depth
    return rows


def random_parents(rows: int, depth: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    parents, depths = [-1], [0]
    while len(parents) < rows:
        parent = rng.choice([i for i, x in enumerate(depths) if x < depth])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def _used(lanes: TreeLanes, q: int, p: int, count: int) -> Iterator[tuple[int, int, int]]:
    columns = (x[0, q, p, :count].tolist() for x in (lanes.slots, lanes.positions, lanes.rows))
    return zip(*columns, strict=True)


@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("block_rows", [1, 5, 64])
@pytest.mark.parametrize("depth", [2, 11, MAX_TREE_NODES])
def test_every_row_sees_its_ancestors_once(d: int, block_rows: int, depth: int) -> None:
    """Each group of 16 lanes contains only positions of one group of 16 positions."""
    plan = AttentionPlan(block_rows, 64, False)
    for first in (0, 63, 72, 143):
        parents = random_parents(MAX_TREE_NODES + 1, depth, first)
        rows = tree_pass(parents, first, depth)
        sizes = tail_sizes(rows, d, plan)
        assert sizes is not None and rows.tree_masks is not None
        lanes = reference(rows, sizes)
        masks = rows.tree_masks.tolist()
        low = first // sizes.block_keys * sizes.block_keys
        for q, counts in enumerate(lanes.counts[0].tolist()):
            used = [  # slot, position, rows, group of lanes
                (*lane, (p, i // 16))
                for p, count in enumerate(counts)
                for i, lane in enumerate(_used(lanes, q, p, count))
            ]
            order = lanes.order.tolist()[q * block_rows : (q + 1) * block_rows]
            for i, row in enumerate(order):
                seen = [lane for lane in used if lane[2] >> i & 1]
                path = [first + j for j in range(len(masks)) if masks[row] >> j & 1]
                # Pages are in order, so a slot equals a KV position.
                assert [slot for slot, _, _, _ in seen] == [*range(low, first), *path]
                positions = [position for _, position, _, _ in seen]
                assert positions == list(range(low, low + len(seen)))
                groups = {(position // 16, group) for _, position, _, group in seen}
                assert len(groups) == len({x for x, _ in groups}) == len({x for _, x in groups})


def test_chains_have_no_tree_lanes() -> None:
    rows = tree_pass([-1, 0, 1], 5, 2)
    rows.tree_masks = None
    assert tail_sizes(rows, 64, AttentionPlan(5, 16, True)) is None


def test_rows_in_depth_first_order() -> None:
    """Children with higher numbers come first."""
    masks = [0b1, 0b11, 0b111, 0b1111, 0b10001]
    assert depth_first(masks) == [0, 4, 1, 2, 3]
