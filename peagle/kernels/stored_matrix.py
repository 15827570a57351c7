"""StoredMatrix: a weight in the blocks of a GGUF file, as they are stored.

A block holds small numbers (codes) of consecutive inputs of one output, and what widens them:

    W = scale * code + minimum

The scale and the minimum belong to 32 inputs (16 in Q6_K). The formats of the K family store both
as small numbers too, with two factors for 256 inputs.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class BlockFormat(NamedTuple):
    inputs: int  # of one block
    size: int  # bytes of one block


BLOCK_FORMATS = {
    "Q4_0": BlockFormat(32, 18),
    "Q4_1": BlockFormat(32, 20),
    "Q5_0": BlockFormat(32, 22),
    "Q5_1": BlockFormat(32, 24),
    "Q8_0": BlockFormat(32, 34),
    "Q4_K": BlockFormat(256, 144),
    "Q6_K": BlockFormat(256, 210),
}


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    format: str  # one of BLOCK_FORMATS
    blocks: Tensor  # [outputs, bytes of a row] uint8

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)"""
        block = BLOCK_FORMATS[self.format]
        return self.blocks.shape[0], self.blocks.shape[1] // block.size * block.inputs

    def dequantize(self) -> Tensor:
        """The weight [outputs, inputs] in float32."""
        from gguf import GGMLQuantizationType, quants

        blocks = self.blocks.cpu().contiguous().numpy()
        wide = quants.dequantize(blocks, GGMLQuantizationType[self.format])
        return torch.from_numpy(wide).to(self.blocks.device)

    def rows(self, ids: Tensor) -> Tensor:
        """The outputs `ids` [T], widened to float32 [T, inputs]: the lookup of an embedding."""
        return StoredMatrix(self.format, self.blocks[ids]).dequantize()
