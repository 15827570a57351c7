"""The optimizer and its learning rate: AdamW, or Muon for the matrices of the layers."""

import math
from typing import Any

import torch
from torch import nn

from peagle.train.config import TrainConfig
from peagle.train.optim.muon import Muon


class Optimizers:
    """One or two optimizers that step together. Learning rates are a pure function of the step."""

    def __init__(self, drafter: nn.Module, config: TrainConfig, total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        named = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
        matrices = []
        if config.optimizer == "muon":
            matrices = [(name, p) for name, p in named if is_matrix(p) and "embed" not in name]
        others = [(name, p) for name, p in named if all(p is not m for _, m in matrices)]
        fused = all(p.is_cuda for _, p in others)
        betas = (config.beta1, config.beta2)
        decay = config.weight_decay
        self.parts: list[torch.optim.Optimizer] = []
        if others:
            groups = parameter_groups(others)
            self.parts.append(
                torch.optim.AdamW(groups, config.lr, betas, weight_decay=decay, fused=fused)
            )
        if matrices:  # Muon's updates are scaled to AdamW's size: one learning rate serves both.
            groups = parameter_groups(matrices)
            self.parts.append(Muon(groups, config.lr, weight_decay=decay))

    def step(self, step: float) -> float:
        """Update the weights with the gradients of `step` (from 0) and clear the gradients.

        Returns the fraction of the peak learning rate.
        """
        fraction = self.lr_fraction(step)
        for optimizer in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = self.config.lr * fraction * group.get("lr_factor", 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return fraction

    def lr_fraction(self, step: float) -> float:
        """The fraction of the peak learning rate: linear warm-up, then the schedule to final_lr."""
        config = self.config
        warmup_steps = max(1, round(config.warmup * self.total_steps))
        if step < warmup_steps:
            return min(1.0, (step + 1) / warmup_steps)  # With `minutes`, steps are fractions.
        done = min(1.0, (step - warmup_steps) / max(1, self.total_steps - warmup_steps))
        schedules = {
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "linear": 1 - done,
            "constant": 1.0,
        }
        return config.final_lr + (1 - config.final_lr) * schedules[config.schedule]


def parameter_groups(named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """One group for each factor on the learning rate; a group without `lr_factor` has 1."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in named:
        groups.setdefault(lr_factor(name, parameter), []).append(parameter)
    return [
        {"params": params} | ({} if factor == 1 else {"lr_factor": factor})
        for factor, params in groups.items()
    ]


def lr_factor(name: str, parameter: nn.Parameter) -> float:
    """1 / sqrt(inputs) for the gate of a convolution, 1 for all others.

    The gate reads normed rows, of length sqrt(inputs), and its outputs are factors of whole states,
    as those in `base` are. At the full rate they change many times as fast as `base`: the gate
    grows with noise, and the loss rises.
    """
    return parameter.shape[1] ** -0.5 if "convolution" in name and is_matrix(parameter) else 1.0


def is_matrix(parameter: nn.Parameter) -> bool:
    """Whether it is a matrix, not a vector with two dimensions as the confidence output is."""
    return parameter.ndim == 2 and min(parameter.shape) > 1
