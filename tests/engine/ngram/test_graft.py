"""Grafting an n-gram draft onto a draft tree."""

import random

import pytest
import torch

from peagle.draft_shape import DraftShape
from peagle.engine.kv.slots import empty_trees
from peagle.engine.ngram.graft import graft_branch
from peagle.kernels.triton.build_tree import DraftTrees

Path = tuple[int, ...]


def random_tree(rng: random.Random, trees: DraftTrees, slot: int, shape: DraftShape) -> None:
    """Write a random tree with distinct children, up to the depth of the shape."""
    paths: list[Path] = [()]
    for node in range(shape.nodes):
        while True:
            parent = rng.randrange(len(paths))
            path = (*paths[parent], rng.randrange(4))
            if len(path) <= shape.k and path not in paths:
                break
        paths.append(path)
        trees.nodes[slot, node] = path[-1]
        trees.parents[slot, node] = parent
        trees.depths[slot, node] = len(path)
        trees.masks[slot, node + 1] = trees.masks[slot, parent] | 1 << node + 1
    trees.masks[slot, 0] = 1


def paths_of(trees: DraftTrees, slot: int, count: int) -> list[Path]:
    """The path of every node. Asserts that depths and masks match the parents."""
    paths: list[Path] = [()]
    masks = [1]
    for node in range(count):
        parent = int(trees.parents[slot, node])
        assert parent <= node
        paths.append((*paths[parent], int(trees.nodes[slot, node])))
        masks.append(masks[parent] | 1 << node + 1)
        assert trees.depths[slot, node] == len(paths[-1])
        assert trees.masks[slot, node + 1] == masks[-1]
    return paths[1:]


@pytest.mark.parametrize("shape", [DraftShape(3, 5), DraftShape(4, 15), DraftShape(7, 31)], ids=str)
def test_the_branch_is_added_and_likely_nodes_are_kept(shape: DraftShape) -> None:
    rng = random.Random(0)
    for _ in range(40):
        trees = empty_trees(3, shape, torch.device("cpu"))
        trees.masks[:, 0] = 1
        for slot in range(3):
            random_tree(rng, trees, slot, shape)
        before = [paths_of(trees, slot, shape.nodes) for slot in range(3)]
        drafts = torch.tensor([[rng.randrange(4) for _ in range(shape.k)] for _ in range(2)])
        graft_branch(trees, torch.tensor([2, 0]), drafts, torch.tensor([True, False]), shape)
        after = [paths_of(trees, slot, shape.nodes) for slot in range(3)]
        assert after[:2] == before[:2]  # Slot 1 is not given, and the draft of slot 0 is not used.
        branch = tuple(drafts[0].tolist())
        prefixes = [branch[: i + 1] for i in range(shape.k)]
        assert set(prefixes) <= set(after[2]) and len(set(after[2])) == shape.nodes
        kept = shape.nodes - sum(path not in before[2] for path in prefixes)
        lost = [path for path in before[2][: shape.nodes - shape.k] if path not in after[2]]
        assert not lost and kept >= shape.nodes - shape.k
