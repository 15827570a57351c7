"""An untrained drafter: the start of training, and what runs until a trained one exists."""

import torch
from torch import Tensor, nn

from peagle.drafter.config import DrafterConfig
from peagle.drafter.model import Drafter
from peagle.target import Target


def untrained_drafter(
    config: DrafterConfig, target: Target, seed: int = 0, target_ids: Tensor | None = None
) -> Drafter:
    """Make a drafter whose random weights depend on `seed` alone.

    Weights are N(0, 0.02), mask_hidden is N(0, 1), and the mask embedding is the target's row of
    that token. The optional parts (inject, convolution, refinement, dependency, confidence) start
    at zero: every variant starts as the plain drafter.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(config)
        initialize_weights(drafter)
    if drafter.mask_embedding is not None:
        assert config.mask_token_id is not None
        drafter.mask_embedding.data.copy_(target.embed(config.mask_token_id))
    drafter = drafter.to(device=target.device, dtype=target.dtype)
    drafter.set_embed_and_head(target.embedding_table, target.head_table, target_ids)
    return drafter.eval().requires_grad_(False)


def initialize_weights(drafter: Drafter) -> None:
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    optional_outputs = [
        *drafter.inject,
        drafter.dependency and drafter.dependency.out,
        drafter.confidence,
        *(part.gate for part in drafter.convolution),
        *(drafter.refinement.outputs if drafter.refinement is not None else ()),
    ]
    for module in filter(None, optional_outputs):
        nn.init.zeros_(module.weight)
