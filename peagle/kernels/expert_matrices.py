"""ExpertMatrices: one projection of all experts of a layer, in the format in which it is stored.

| format | weight | scales |
|---|---|---|
| float | [E, N, K] in the dtype of the rows | none |
| fp8, int8 | [E, N, K] | [E, N] float32: one per output |
| mxfp4 | [E, N, K / 2] uint8: two codes, the first in the low bits | [E, N, K / 32] uint8 |
| mxfp4, tiled | [E, N / 16, K / 128, 16, 64] uint8 (mxfp4_tiles.py) | [E, .., 16, 4] uint8 |

An MXFP4 code is a float of 4 bits (sign, two bits of exponent, one of mantissa). 32 inputs share a
scale: the exponent of a power of 2, plus 127.

    codes  0 1   2 3   4 5 6 7     8 .. 15: the same, negative
    value  0 0.5 1 1.5 2 3 4 6
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peagle.kernels.mxfp4_tiles import TILE_ROWS, from_tiles, to_tiles

MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_BLOCK = 32  # inputs that share a scale
MAX_FAST_SCALE = 128  # the largest scale that the fast decoding on a GPU supports: a factor of 2
MXFP4_BIAS = 127  # of the exponents that are stored as scales


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """gate * sigmoid(alpha * gate) * (up + up_shift), with gate and up clamped first.

    The defaults are those of SwiGLU; GPT-OSS has another alpha, a limit and a shift of 1.
    """

    interleaved: bool = False  # Outputs 0 2 4 .. are gates, 1 3 5 .. are ups; else gates come first
    alpha: float = 1.0
    limit: float | None = None  # gate <= limit, -limit <= up <= limit
    up_shift: float = 0.0

    def split(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """[.., 2I] -> gate and up, [.., I] each."""
        if self.interleaved:
            return gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate_up.chunk(2, -1)
        return gate, up

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[.., 2I] -> [.., I], computed in float32 and rounded once."""
        gate, up = (x.float() for x in self.split(gate_up))
        if self.limit is not None:
            gate = gate.clamp(max=self.limit)
            up = up.clamp(-self.limit, self.limit)
        return (gate * torch.sigmoid(self.alpha * gate) * (up + self.up_shift)).to(gate_up.dtype)


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    weight: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None  # [E, N]
    tiled_inputs: int = 0  # K of a tiled matrix, whose scales do not exceed MAX_FAST_SCALE

    @property
    def is_mxfp4(self) -> bool:
        return self.weight.dtype == torch.uint8

    @property
    def is_tiled(self) -> bool:
        return self.tiled_inputs > 0

    @property
    def num_experts(self) -> int:
        return self.weight.shape[0]

    @property
    def outputs(self) -> int:
        return self.weight.shape[1] * (TILE_ROWS if self.is_tiled else 1)

    @property
    def inputs(self) -> int:
        if self.is_tiled:
            return self.tiled_inputs
        return self.weight.shape[2] * (2 if self.is_mxfp4 else 1)

    @property
    def expert_bytes(self) -> int:
        """Bytes that a product with one expert reads."""
        tensors = (self.weight, self.scales, self.bias)
        return sum(x[0].numel() * x.element_size() for x in tensors if x is not None)

    def for_gpu(self, dtype: torch.dtype) -> "ExpertMatrices":
        """The same for kernels on a GPU: MXFP4 in tiles, where they are supported.

        They are for rows in bf16 (`dtype`), and for scales that the fast decoding supports.
        """
        if not self.is_mxfp4 or self.is_tiled or dtype != torch.bfloat16:
            return self
        assert self.scales is not None
        if self.outputs % TILE_ROWS or int(self.scales.max()) > MAX_FAST_SCALE:
            return self
        # One expert after another, to save memory.
        tiles = (to_tiles(*expert) for expert in zip(self.weight, self.scales, strict=True))
        weight, scales = (torch.stack(x) for x in zip(*tiles, strict=True))
        return replace(self, weight=weight, scales=scales, tiled_inputs=self.inputs)

    def dense(self, expert: int, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K] of one expert, multiplied out."""
        weight = self.weight[expert]
        if self.scales is None:
            return weight.to(dtype)
        scales = self.scales[expert]
        if not self.is_mxfp4:
            return (weight.float() * scales[:, None]).to(dtype)
        if self.is_tiled:
            weight, scales = from_tiles(weight, scales, self.inputs)
        return decode_mxfp4(weight, scales, dtype)


def decode_mxfp4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """codes [.., K / 2] and scales [.., K / 32], both uint8 -> [.., K]"""
    table = torch.tensor([*MXFP4_VALUES, *(-x for x in MXFP4_VALUES)], device=codes.device)
    values = table[torch.stack([codes & 15, codes >> 4], -1).long()].flatten(-2)  # [.., K]
    exponents = scales.int() - MXFP4_BIAS
    blocks = values.unflatten(-1, (-1, MXFP4_BLOCK))
    return torch.ldexp(blocks, exponents[..., None]).flatten(-2).to(dtype)
