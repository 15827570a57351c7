"""Planted drafts, which replace those of the drafter and have a part of the right answer."""

import random

import torch

from peagle.engine import Engine
from peagle.kernels.triton.build_tree import tree_topology

VOCAB = 96
BRANCHES = 5  # candidates of each depth


def plant_trees(
    engine: Engine, answers: dict[str, list[int]], rng: random.Random, k: int, nodes: int
) -> None:
    """Replace the drafts by random trees that follow the answer up to a random depth."""
    slots = engine.loop.stepper.slots
    for id, state in engine.loop.states.items():
        if state.slot is None:
            continue
        expected = next_tokens(engine, state.slot, answers[id], k)
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        scores = torch.randn(1, k, 1, BRANCHES, generator=generator).log_softmax(-1)
        tree = tree_topology(scores, nodes)
        parents = tree.parents[0].tolist()
        depths = tree.depths[0].tolist()
        ids = [(expected[depth - 1] + 1 + node) % VOCAB for node, depth in enumerate(depths)]
        deepest = max(rng.choices(range(nodes), k=3), key=depths.__getitem__)
        row = deepest + 1
        true_depth = rng.randrange(k + 1)
        while row:  # The node and its ancestors.
            if depths[row - 1] <= true_depth:
                ids[row - 1] = expected[depths[row - 1] - 1]
            row = parents[row - 1]
        rows = (torch.tensor(ids), tree.parents[0], tree.depths[0])
        for all_slots, own in zip(slots.trees[1:4], rows, strict=True):
            all_slots[state.slot, :nodes] = own
        slots.trees.masks[state.slot, : nodes + 1] = tree.masks[0]


def plant_chains(engine: Engine, answers: dict[str, list[int]], rng: random.Random, k: int) -> None:
    """Replace the drafts by chains of which a random number of first drafts is right."""
    slots = engine.loop.stepper.slots
    for id, state in engine.loop.states.items():
        if state.slot is not None:
            drafts = next_tokens(engine, state.slot, answers[id], k)
            right = rng.randrange(k + 1)
            drafts[right:] = [(token + 1) % VOCAB for token in drafts[right:]]
            slots.trees.chain[state.slot, :k] = torch.tensor(drafts)


def plant_random(engine: Engine, answers: dict[str, list[int]], rng: random.Random) -> None:
    """Plant both a chain and a tree, because the engine may verify either of them next."""
    shape = engine.max_shape
    if shape.k:
        plant_chains(engine, answers, rng, shape.k)
    if not shape.is_chain:
        plant_trees(engine, answers, rng, shape.k, shape.nodes)


def next_tokens(engine: Engine, slot: int, answer: list[int], count: int) -> list[int]:
    """The next tokens of the answer, after those of passes that are not read back yet."""
    emitted = int(engine.loop.stepper.slots.emitted[slot])
    return (answer[emitted:] + [3] * count)[:count]
