"""Matrix products on ARM under qemu: every format, rows of float32 and bf16, and int8."""

import pytest
import torch
from torch.nn.functional import linear

from peagle.kernels.cpu.matrix import Packable, PackedMatrix, quantize_int8
from peagle.kernels.stored_matrix import BLOCK_FORMATS, StoredMatrix
from tests.support.comparing import some
from tests.support.gguf_files import random_blocks

pytestmark = [pytest.mark.arm, pytest.mark.usefixtures("cpu_level")]
N, K = 50, 512
EXACT, ROUNDED = 1e-4, 0.02  # of the largest output


def weight_of(format: str) -> tuple[Packable, torch.Tensor]:
    weight = (some(N, K) / K**0.5).bfloat16()
    if format == "BF16":
        return weight, weight.float()
    if format == "INT8":
        matrix = quantize_int8(weight)
        return matrix, matrix.codes * matrix.scales[:, None]
    stored = StoredMatrix(format, torch.from_numpy(random_blocks(format, N, K, seed=1)))
    return stored, stored.dequantize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("format", "int8_rows"),
    [("BF16", False), ("INT8", True), *((name, int8) for name in BLOCK_FORMATS for int8 in (0, 1))],
)
def test_products(format: str, int8_rows: bool, dtype: torch.dtype) -> None:
    weight, dense = weight_of(format)
    bias = some(N)
    matrix = PackedMatrix(weight, bias, bool(int8_rows))
    x = some(9, K).to(dtype)
    result = matrix(x)
    expected = linear(x.float(), dense, bias)
    limit = ROUNDED if int8_rows or dtype == torch.bfloat16 else EXACT
    assert (result.float() - expected).abs().max() <= limit * expected.abs().max()
    assert torch.equal(matrix(x[4:5]), result[4:5]), "a row depends on its neighbors"
