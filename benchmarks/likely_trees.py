"""Draft trees as a drafter makes them: the most likely nodes of random candidates."""

import torch

from benchmarks.exact_attention import DEVICE, chain_rows
from benchmarks.exact_kernels import CACHES
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.build_tree import tree_topology

CANDIDATES = 16


def likely_tree_rows(batch: int, nodes: int, depth: int, firsts: list[int]) -> RowPass:
    """Trees of `nodes` rows each, no deeper than `depth`.

    The best candidate of a depth has a probability of 0.6 on average, as that of the shipped
    drafter.
    """
    rows = chain_rows([nodes] * batch, firsts)
    generator = torch.Generator().manual_seed(nodes)
    logits = torch.randn(batch, depth, 1, CANDIDATES, generator=generator) * 2.5
    tree = tree_topology(logits.log_softmax(-1), nodes - 1)
    depths = torch.cat([torch.zeros(batch, 1), tree.depths], 1).long()
    rows.tree_masks = tree.masks.flatten().to(DEVICE)
    rows.positions = (torch.tensor(firsts)[:, None] + depths).flatten().to(DEVICE)
    rows.tree_depth = depth
    CACHES.append(rows._cache)
    return rows
