"""Planted drafts: in place of the drafter's own, with a known part of the true answer."""

import random

import torch

from peagle.engine import Engine
from peagle.kernels.triton.build_tree import tree_topology

VOCAB = 96
BRANCHES = 5  # candidates of each depth


def plant_trees(
    engine: Engine, answers: dict[str, list[int]], chance: random.Random, k: int, nodes: int
) -> None:
    """Replace the drafts by random trees that hold the true answer up to a random depth."""
    slots = engine.loop.stepper.slots
    for id, state in engine.loop.states.items():
        if state.slot is None:
            continue
        truth = next_tokens(engine, state.slot, answers[id], k)
        generator = torch.Generator().manual_seed(chance.getrandbits(32))
        scores = torch.randn(1, k, 1, BRANCHES, generator=generator).log_softmax(-1)
        grown = tree_topology(scores, nodes)
        parents = grown.parents[0].tolist()
        depths = grown.depths[0].tolist()
        ids = [(truth[depth - 1] + 1 + node) % VOCAB for node, depth in enumerate(depths)]
        deepest = max(chance.choices(range(nodes), k=3), key=depths.__getitem__)
        row = deepest + 1
        true_depth = chance.randrange(k + 1)
        while row:  # this node and its ancestors
            if depths[row - 1] <= true_depth:
                ids[row - 1] = truth[depths[row - 1] - 1]
            row = parents[row - 1]
        rows = (torch.tensor(ids), grown.parents[0], grown.depths[0])
        for whole, own in zip(slots.trees[1:4], rows, strict=True):
            whole[state.slot, :nodes] = own
        slots.trees.masks[state.slot, : nodes + 1] = grown.masks[0]


def plant_chains(
    engine: Engine, answers: dict[str, list[int]], chance: random.Random, k: int
) -> None:
    """Replace the drafts by chains of which a random beginning is right."""
    slots = engine.loop.stepper.slots
    for id, state in engine.loop.states.items():
        if state.slot is not None:
            drafts = next_tokens(engine, state.slot, answers[id], k)
            right = chance.randrange(k + 1)
            drafts[right:] = [(token + 1) % VOCAB for token in drafts[right:]]
            slots.trees.chain[state.slot, :k] = torch.tensor(drafts)


def plant_random(engine: Engine, answers: dict[str, list[int]], chance: random.Random) -> None:
    """Chains and trees of all sizes that the engine may verify next."""
    shape = engine.max_shape
    if shape.k:
        plant_chains(engine, answers, chance, shape.k)
    if not shape.is_chain:
        plant_trees(engine, answers, chance, shape.k, shape.nodes)


def next_tokens(engine: Engine, slot: int, answer: list[int], count: int) -> list[int]:
    """The true tokens that come next; the device knows of passes that are not read back yet."""
    emitted = int(engine.loop.stepper.slots.emitted[slot])
    return (answer[emitted:] + [3] * count)[:count]
