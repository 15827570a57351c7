"""The optimizer and its learning rate: AdamW, or PyTorch's Muon for the matrices of the layers."""

import math

import torch
from torch import nn

from peagle.train.config import TrainConfig
from peagle.train.optim.muon import Muon


class Optimizers:
    """One or two optimizers that step together. Learning rates are a pure function of the step."""

    def __init__(self, drafter: nn.Module, config: TrainConfig, total: int) -> None:
        self.config, self.total = config, total
        named = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
        matrices = [
            p
            for name, p in named
            if config.optimizer == "muon" and is_matrix(p) and "embed" not in name
        ]
        others = [p for _, p in named if all(p is not m for m in matrices)]
        fused = all(p.is_cuda for p in others)
        betas, decay = (config.beta1, config.beta2), config.weight_decay
        self.parts: list[torch.optim.Optimizer] = []
        if others:
            self.parts.append(
                torch.optim.AdamW(others, config.lr, betas, weight_decay=decay, fused=fused)
            )
        if matrices:  # its updates are scaled to AdamW's size: one learning rate serves both
            self.parts.append(Muon(matrices, config.lr, weight_decay=decay))

    def step(self, step: int) -> float:
        """Updates the weights after the gradients of `step` (from 0) and forgets them; tells the rate's share."""
        share = self.share(step)
        for optimizer in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = self.config.lr * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return share

    def share(self, step: int) -> float:
        """Of the peak learning rate: a linear warm-up, then the schedule down to final_lr."""
        config = self.config
        warm = max(1, round(config.warmup * self.total))
        if step < warm:
            return (step + 1) / warm
        done = (step - warm) / max(1, self.total - warm)
        fall = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[
            config.schedule
        ]
        return config.final_lr + (1 - config.final_lr) * fall


def is_matrix(parameter: nn.Parameter) -> bool:
    """And not a vector with a second dimension, as the confidence output is."""
    return parameter.ndim == 2 and min(parameter.shape) > 1
