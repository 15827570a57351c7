"""PyTorch's Muon with batched Newton-Schulz iterations.

Matrices of one shape are orthogonalized together: a tenth of the kernels, the same update.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Muon):
    """Its state is that of torch.optim.Muon.

    Learning rates are scaled to AdamW's (0.2 * square root of the longer side).
    """

    def __init__(self, params: Any, lr: float, **kwargs: Any) -> None:
        super().__init__(params, lr, adjust_lr_fn="match_rms_adamw", **kwargs)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for parameters in by_shape.values():
                self._update(parameters, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momentum = group["momentum"]
        buffers = [self.state[p]["momentum_buffer"] for p in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        nesterov = group["nesterov"]
        updates = torch._foreach_lerp(gradients, buffers, momentum) if nesterov else buffers
        orthogonal = orthogonalize(
            torch.stack(updates), group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        rate = group["lr"] * 0.2 * max(parameters[0].shape) ** 0.5
        deltas = list(orthogonal.to(parameters[0].dtype).unbind(0))
        torch._foreach_add_(parameters, deltas, alpha=-rate)


def orthogonalize(
    x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """x [n, rows, columns] -> nearly orthogonal, by Newton-Schulz iterations in bfloat16."""
    a, b, c = coefficients
    wide = x.shape[1] <= x.shape[2]
    y = (x if wide else x.mT).bfloat16()
    y = y / y.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y if wide else y.mT
