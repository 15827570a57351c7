"""A drafter that has learned nothing: where training starts, and what runs until a trained one is there."""

import torch
from torch import Tensor, nn

from peagle.drafter.config import DrafterConfig
from peagle.drafter.model import Drafter
from peagle.target import Target


def untrained(
    config: DrafterConfig, target: Target, seed: int = 0, target_ids: Tensor | None = None
) -> Drafter:
    """Normal weights of 0.02, mask_hidden N(0, 1), the mask's own embedding row; repeatable by its seed.

    What only some drafters have (inject, dependency, confidence) begins as nothing: each starts as the plain one.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(config)
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nothing = [
            *drafter.inject,
            drafter.dependency and drafter.dependency.out,
            drafter.confidence,
        ]
        for module in filter(None, nothing):
            nn.init.zeros_(module.weight)
    if drafter.mask_embedding is not None:
        drafter.mask_embedding.data.copy_(target.embedding[config.mask_token_id])
    drafter = drafter.to(device=target.device, dtype=target.dtype)
    drafter.set_embed_and_head(target.embedding, target.lm_head, target_ids)
    return drafter.eval().requires_grad_(False)
