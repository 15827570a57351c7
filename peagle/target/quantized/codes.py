"""Codes: a matrix as small numbers and the scales they are multiplied with.

    W[n, k] is about codes[n, k] * scales[n, k // group]

Rounding is to the nearest. Of whole numbers, how much of a row's (or group's) largest magnitude is kept is searched:
cutting an outlier off may leave the others closer to what they were. A number of fp8 is as exact as any other of its
kind, whatever the scale: nothing is searched there.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peagle.target.quantized.formats import WeightFormat

CLIPS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.76, 0.73, 0.7)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    codes: Tensor  # [N, K] int8 or float8_e4m3fn
    scales: Tensor  # [N, groups]

    @property
    def by_row(self) -> bool:
        """One scale an output: it can be applied behind the sum."""
        return self.scales.shape[1] == 1

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """[N, K], multiplied out in float32 and rounded once."""
        n, groups = self.scales.shape
        wide = self.codes.float().view(n, groups, -1) * self.scales.float()[:, :, None]
        return wide.view(n, -1).to(dtype)

    def to(self, device: torch.device) -> "Codes":
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device))


def concatenate_weights(parts: list[QuantizedWeight | None]) -> QuantizedWeight | None:
    """Of several matrices with the same inputs, one behind the other; None where one of them has none."""
    found = [part for part in parts if part is not None]
    if (
        len(found) < len(parts)
        or len({(part.codes.dtype, part.scales.shape[1]) for part in found}) > 1
    ):
        return None
    return QuantizedWeight(
        torch.cat([part.codes for part in found]), torch.cat([part.scales for part in found])
    )


def quantize_matrix(weight: Tensor, to: WeightFormat, group: int | None) -> QuantizedWeight:
    """weight [N, K]: for each row or group the clip with the least squared error."""
    n, k = weight.shape
    x = weight.float().view(n, -1, group or k)  # [N, groups, inputs]
    peak = x.abs().amax(2, keepdim=True)
    best = scales = torch.full_like(peak, torch.inf)
    for clip in CLIPS if to.searched else CLIPS[:1]:
        step = (
            (peak * (clip / to.whole))
            .to(to.scales)
            .float()
            .clamp_min(torch.finfo(torch.bfloat16).tiny)
        )
        error = (rounded(x, step, to).float() * step - x).square().sum(2, keepdim=True)
        scales = torch.where(error < best, step, scales)
        best = torch.minimum(error, best)
    return QuantizedWeight(rounded(x, scales, to).view(n, k), scales[:, :, 0].to(to.scales))


def rounded(x: Tensor, step: Tensor, to: WeightFormat) -> Tensor:
    wide = (x / step).clamp(to.low, to.high)
    return (wide if to.codes.is_floating_point else wide.round()).to(to.codes)
