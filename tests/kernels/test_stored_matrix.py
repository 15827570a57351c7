"""Dequantization in PyTorch gives the same bits as gguf.quants."""

import pytest
import torch
from gguf import GGMLQuantizationType, quants

from peagle.kernels.stored_matrix import BLOCK_FORMATS, StoredMatrix, dense, table_rows
from tests.support.models.gguf_files import random_blocks


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_values_are_those_of_the_gguf_package(format: str) -> None:
    blocks = random_blocks(format, 40, 512, seed=1)
    matrix = StoredMatrix(format, torch.from_numpy(blocks))
    expected = torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType[format]))
    assert matrix.shape == (40, 512) == tuple(expected.shape) and len(matrix) == 40
    assert torch.equal(matrix.dequantize(), expected)
    ids = torch.tensor([[3, 39], [0, 3]])
    assert torch.equal(matrix.rows(ids), expected[ids])
    assert torch.equal(table_rows(matrix, ids, torch.bfloat16), expected[ids].bfloat16())
    assert torch.equal(matrix.select(ids[0]).dequantize(), expected[ids[0]])
    assert torch.equal(dense(matrix), expected)
