"""Quantized weights: a matrix as small numbers (codes) and scales.

    W[n, k] is approximately codes[n, k] * scales[n, k // group]

Codes are rounded to the nearest. For integers, the clipping point of each row or group is searched:
clipping an outlier may reduce the error of the other weights. For fp8 nothing is searched, because
its relative error does not depend on the scale.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peagle.target.quantized.formats import WeightFormat

# Candidate clipping points as fractions of the largest magnitude of a row or group.
CLIP_FRACTIONS = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.76, 0.73, 0.7)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    codes: Tensor  # [N, K] int8 or float8_e4m3fn
    scales: Tensor  # [N, groups]

    @property
    def by_row(self) -> bool:
        """Whether each output has one scale, which can be applied after the sum over the inputs."""
        return self.scales.shape[1] == 1

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The dequantized matrix [N, K], multiplied in float32 and rounded once."""
        n, groups = self.scales.shape
        wide = self.codes.float().view(n, groups, -1) * self.scales.float()[:, :, None]
        return wide.view(n, -1).to(dtype)

    def to(self, device: torch.device) -> "QuantizedWeight":
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device))


def concatenate_weights(parts: list[QuantizedWeight | None]) -> QuantizedWeight | None:
    """Concatenate the outputs of matrices with the same inputs.

    None if one of them is not quantized or if their formats differ.
    """
    weights = [part for part in parts if part is not None]
    formats = {(weight.codes.dtype, weight.scales.shape[1]) for weight in weights}
    if len(weights) < len(parts) or len(formats) > 1:
        return None
    codes = torch.cat([weight.codes for weight in weights])
    scales = torch.cat([weight.scales for weight in weights])
    return QuantizedWeight(codes, scales)


def quantize_matrix(weight: Tensor, format: WeightFormat, group: int | None) -> QuantizedWeight:
    """Quantize weight [N, K]; each row or group uses the clipping point with the least error."""
    n, k = weight.shape
    codes = weight.new_empty(n, k, dtype=format.codes)  # Before temporaries: a compact heap.
    x = weight.float().view(n, -1, group or k)  # [N, groups, inputs]
    peak = x.abs().amax(2, keepdim=True)  # [N, groups, 1]
    least_error = scales = torch.full_like(peak, torch.inf)
    smallest = torch.finfo(torch.bfloat16).tiny  # a row of zeros has a positive scale, too
    for clip in CLIP_FRACTIONS if format.searches_clip else CLIP_FRACTIONS[:1]:
        step = (peak * (clip / format.full_scale)).to(format.scales).float().clamp_min(smallest)
        error = (round_to_codes(x, step, format).float() * step - x).square()
        error = error.sum(2, keepdim=True)
        scales = torch.where(error < least_error, step, scales)
        least_error = torch.minimum(error, least_error)
    codes.copy_(round_to_codes(x, scales, format).view(n, k))
    return QuantizedWeight(codes, scales[:, :, 0].to(format.scales))


def round_to_codes(x: Tensor, step: Tensor, format: WeightFormat) -> Tensor:
    wide = (x / step).clamp(format.low, format.high)
    return (wide if format.codes.is_floating_point else wide.round()).to(format.codes)
