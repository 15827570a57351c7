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
from torch.nn.functional import embedding

from peagle.kernels.dequantize import dequantize


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

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def __len__(self) -> int:
        """The number of outputs."""
        return len(self.blocks)

    def dequantize(self) -> Tensor:
        """The weight [outputs, inputs] in float32."""
        return dequantize(self.blocks, BLOCK_FORMATS[self.format].size, self.format)

    def select(self, ids: Tensor) -> "StoredMatrix":
        """The outputs `ids` [T] as a matrix of their own, in the same format."""
        return StoredMatrix(self.format, self.blocks[ids])

    def rows(self, ids: Tensor) -> Tensor:
        """The outputs `ids` [...], widened to float32 [..., inputs]: the lookup of an embedding."""
        return self.select(ids.flatten()).dequantize().view(*ids.shape, -1)


# The table of an embedding or an lm_head, [vocabulary, d].
Table = Tensor | StoredMatrix


def table_rows(table: Table, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The rows `ids` [...] of a table, [..., d]; `dtype` None: that of the table, or float32."""
    rows = table.rows(ids) if isinstance(table, StoredMatrix) else embedding(ids, table)
    return rows if dtype is None else rows.to(dtype)


def select_rows(table: Table, ids: Tensor) -> Table:
    """The rows `ids` [T] as a table of their own."""
    return table.select(ids) if isinstance(table, StoredMatrix) else table[ids]


def table_bytes(table: Table) -> int:
    """The memory that a table takes."""
    tensor = table.blocks if isinstance(table, StoredMatrix) else table
    return tensor.numel() * tensor.element_size()


def dense(table: Table, dtype: torch.dtype | None = None) -> Tensor:
    """The whole table as a tensor; that of a StoredMatrix is computed anew in every call."""
    tensor = table.dequantize() if isinstance(table, StoredMatrix) else table
    return tensor if dtype is None else tensor.to(dtype)
