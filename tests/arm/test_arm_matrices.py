"""Matrix products on ARM under qemu: every format, rows of float32 and bf16, and int8."""

import pytest
import torch
from torch.nn.functional import linear

from peagle.kernels.cpu.matrix import Packable, PackedMatrix, quantize_int8
from peagle.kernels.expert_matrices import decode_mxfp4
from peagle.kernels.stored_matrix import BLOCK_FORMATS, StoredMatrix
from tests.support.kernels.comparing import some
from tests.support.kernels.expert_layers import some_mxfp4
from tests.support.models.gguf_files import random_blocks

pytestmark = [pytest.mark.arm, pytest.mark.usefixtures("cpu_level")]
N, K = 50, 512
PARTIAL_K = 504  # not a multiple of the block size 32
# Few rows: blocks are widened in registers. Many rows: chunks are widened once for all rows.
ROWS = (9, 40)
BLOCKS = (*BLOCK_FORMATS, "MXFP4")
MIXED = ("Q4_K", "Q6_K", "Q8_0")
EXACT, ROUNDED = 1e-4, 0.02  # tolerances, relative to the largest output


def weight_of(format: str, k: int = K) -> tuple[Packable, torch.Tensor]:
    weight = (some(N, k) / k**0.5).bfloat16()
    if format == "BF16":
        return weight, weight.float()
    if format == "INT8":
        matrix = quantize_int8(weight)
        return matrix, matrix.codes * matrix.scales[:, None]
    if format == "MXFP4":
        blocks = some_mxfp4(N, k)
        return blocks, decode_mxfp4(blocks.codes, blocks.scales, torch.float32)
    stored = StoredMatrix(format, torch.from_numpy(random_blocks(format, N, k, seed=1)))
    return stored, stored.dequantize()


def check_product(matrix: PackedMatrix, dense: torch.Tensor, rows: int, dtype: torch.dtype) -> None:
    x = some(rows, matrix.k).to(dtype)
    result = matrix(x)
    expected = linear(x.float(), dense, matrix.bias)
    limit = ROUNDED if matrix.int8_rows or dtype == torch.bfloat16 else EXACT
    assert (result.float() - expected).abs().max() <= limit * expected.abs().max()
    for row in (4, rows - 1):
        alone = matrix(x[row : row + 1])
        assert torch.equal(alone, result[row : row + 1]), "a row depends on its neighbors"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("format", "int8_rows"),
    [("BF16", False), ("INT8", True), *((name, int8) for name in BLOCKS for int8 in (0, 1))],
)
def test_products(format: str, int8_rows: bool, dtype: torch.dtype, rows: int) -> None:
    weight, dense = weight_of(format)
    check_product(PackedMatrix(weight, some(N), bool(int8_rows)), dense, rows, dtype)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("format", "int8_rows"), [("BF16", False), ("INT8", False), ("INT8", True)]
)
def test_inputs_that_do_not_fill_a_block(
    format: str, int8_rows: bool, dtype: torch.dtype, rows: int
) -> None:
    weight, dense = weight_of(format, PARTIAL_K)
    check_product(PackedMatrix(weight, None, int8_rows), dense, rows, dtype)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("int8_rows", [False, True])
def test_parts_of_different_formats(int8_rows: bool, dtype: torch.dtype, rows: int) -> None:
    names = MIXED if int8_rows else (*MIXED, "BF16")
    parts, dense = zip(*map(weight_of, names), strict=True)
    matrix = PackedMatrix(parts, some(N * len(names)), int8_rows)
    check_product(matrix, torch.cat(dense), rows, dtype)
