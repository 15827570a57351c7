"""Products of packed matrices in every format; the bits of a row do not depend on other rows."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from peagle.kernels.cpu.library import FORMATS
from peagle.kernels.cpu.matrix import (
    Fp8Matrix,
    Int8Matrix,
    Mxfp4Matrix,
    Packable,
    PackedMatrix,
    can_pack,
    quantize_int8,
)
from peagle.kernels.expert_matrices import decode_mxfp4
from peagle.kernels.stored_matrix import BLOCK_FORMATS, StoredMatrix
from tests.support.kernels.comparing import some
from tests.support.kernels.expert_layers import some_mxfp4
from tests.support.models.gguf_files import random_blocks

pytestmark = pytest.mark.usefixtures("cpu_level")
DTYPES = [torch.float32, torch.bfloat16]
INPUTS = 512
OUTPUTS = 101  # not a multiple of a panel: 16, 32 or 48 outputs, or 12 on ARM
ROW_COUNTS = [*range(1, 10), 17, 33, 64, 65]
INT8_FORMATS = FORMATS[1:]  # formats for int8 rows; a bf16 weight is rounded to INT8 first
EVERY_FORMAT = [*((name, False) for name in FORMATS), *((name, True) for name in INT8_FORMATS)]
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # largest relative error
# Each addition rounds, but errors have both signs and partial sums are smaller than the sum of
# magnitudes: in practice the error is a few roundings of that sum. A code that is off by one
# changes a product of 512 inputs by thousands of roundings.
SUM_ROUNDINGS = 16
# Codes before the subtraction of their minimum, or with 128 added, are larger than the weight.
CODE_ROUNDINGS = 32
# The range of bytes in a block that contains the codes.
CODE_BYTES = {
    "Q4_0": (2, 18),
    "Q4_1": (4, 20),
    "Q5_0": (2, 22),
    "Q5_1": (4, 24),
    "Q8_0": (2, 34),
    "Q4_K": (4, 144),
    "Q6_K": (0, 192),
}


def make_weight(format: str, n: int = OUTPUTS, k: int = INPUTS, seed: int = 0) -> Packable:
    if format in BLOCK_FORMATS:
        return StoredMatrix(format, torch.from_numpy(random_blocks(format, n, k, seed)))
    if format == "MXFP4":
        return some_mxfp4(n, k, seed)
    weight = (some(n, k, seed=seed) / k**0.5).bfloat16()
    return weight if format == "BF16" else quantize_int8(weight)


def dense(weight: Packable) -> Tensor:
    """The weight in float32."""
    if isinstance(weight, StoredMatrix):
        return weight.dequantize()
    if isinstance(weight, Mxfp4Matrix):
        return decode_mxfp4(weight.codes, weight.scales, torch.float32)
    if isinstance(weight, Int8Matrix | Fp8Matrix):
        return weight.codes.float() * weight.scales[:, None]
    return weight.float()


def some_rows(count: int, dtype: torch.dtype, k: int = INPUTS) -> Tensor:
    """Rows with gaps between them; some inputs are much larger than others."""
    x = some(count, k + 6) * (1 + 20 * (some(1, k + 6, seed=1) > 2))
    return x.to(dtype)[:, 4 : k + 4]


class QuantizedRows(NamedTuple):
    values: Tensor  # [T, K] float64
    tolerance: Tensor  # [T, K] float64: one step at rounding ties and near them


def quantize_rows(x: Tensor) -> QuantizedRows:
    """x [T, K] rounded to int8, with one step size for each 32 inputs."""
    padded = pad(x.float(), (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    largest = padded.abs().amax(2, keepdim=True)
    steps = (largest / 127).double()
    exact = padded.double() / steps.clamp(min=1e-60)
    ties = (exact.abs() % 1 - 0.5).abs() < 1e-4
    assert exact.round().abs().amax() == 127
    values, tolerance = exact.round() * steps, ties * steps
    return QuantizedRows(*(part.flatten(1)[:, : x.shape[1]] for part in (values, tolerance)))


def check_product(
    matrix: PackedMatrix, x: Tensor, weight: Tensor, bias: Tensor | None, roundings: float
) -> None:
    """Compare with the product in float64; `roundings` bounds the relative error of the sum."""
    wide, tolerance = x.double(), None
    if matrix.int8_rows:
        wide, tolerance = quantize_rows(x)
    expected = wide @ weight.double().T
    size = wide.abs() @ weight.double().abs().T
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    result = matrix(x)
    assert result.dtype == x.dtype and result.shape == expected.shape
    bound = roundings * ROUNDING[torch.float32] * size
    if tolerance is not None:
        bound += tolerance @ weight.double().abs().T
    if x.dtype == torch.bfloat16:
        bound += ROUNDING[torch.bfloat16] * (expected.abs() + bound)
    error = (result.double() - expected).abs()
    assert (error <= bound).all(), f"{(error / bound).max():.3g} times the bound"


def same_bits(a: Tensor, b: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products(format: str, dtype: torch.dtype) -> None:
    weight = make_weight(format)
    bias = some(OUTPUTS)
    has_codes = dtype == torch.bfloat16 and format != "BF16"
    for rows in (3, 70):
        x = some_rows(rows, dtype)
        for used in (None, bias):
            roundings = CODE_ROUNDINGS if has_codes else SUM_ROUNDINGS
            check_product(PackedMatrix(weight, used), x, dense(weight), used, roundings)


@pytest.mark.parametrize("format", INT8_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_int8_rows(format: str, dtype: torch.dtype) -> None:
    weight = make_weight(format)
    bias = some(OUTPUTS)
    matrix = PackedMatrix(weight, bias, int8_rows=True)
    for rows in (3, 70):
        check_product(matrix, some_rows(rows, dtype), dense(weight), bias, CODE_ROUNDINGS)


@pytest.mark.parametrize("format", FORMATS)
def test_products_equal_those_of_the_dequantized_weight(format: str) -> None:
    """The product with a unit vector is a column of the weight."""
    weight = make_weight(format, k=256)
    matrix = PackedMatrix(weight)
    expected = dense(weight).T
    unit = torch.eye(256)
    assert torch.equal(matrix(unit), expected)  # widened into the cache
    few = torch.cat([matrix(rows) for rows in unit.split(3)])
    assert torch.equal(few, expected)  # widened in registers
    assert torch.equal(matrix(2 * unit.bfloat16()), 2 * matrix(unit.bfloat16()))
    torch.testing.assert_close(matrix(unit.bfloat16()).float(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("format", "int8_rows"), EVERY_FORMAT)
def test_bits_depend_only_on_the_row(
    format: str, dtype: torch.dtype, int8_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Number and order of rows and the number of threads have no effect."""
    matrix = PackedMatrix(make_weight(format), some(OUTPUTS), int8_rows)
    x = some_rows(130, dtype)
    whole = matrix(x)
    alone = torch.cat([matrix(row) for row in x.split(1)])
    assert same_bits(whole, alone)
    for count in ROW_COUNTS:
        for start in (0, 130 - count):
            assert same_bits(matrix(x[start : start + count]), whole[start : start + count])
    order = torch.randperm(130, generator=torch.Generator().manual_seed(0))
    assert same_bits(matrix(x[order]), whole[order])
    for threads in (2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        assert same_bits(matrix(x), whole)
        assert same_bits(matrix(x[:5]), whole[:5])


@pytest.mark.parametrize("int8_rows", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 2), (16, 30), (49, 34), (97, 66), (130, 162)])
def test_sizes_that_are_not_multiples_of_a_block(
    n: int, k: int, dtype: torch.dtype, int8_rows: bool
) -> None:
    format = "INT8" if int8_rows else "BF16"
    weight = make_weight(format, n, k)
    matrix = PackedMatrix(weight, some(n), int8_rows)
    for rows in (1, 6, 40):
        x = some_rows(rows, dtype, k)
        check_product(matrix, x, dense(weight), some(n), CODE_ROUNDINGS)
    if not int8_rows:
        codes = make_weight("INT8", n, k)
        check_product(PackedMatrix(codes), x, dense(codes), None, CODE_ROUNDINGS)
    assert matrix(x[:0]).shape == (0, n)


def parts_of(formats: Sequence[str]) -> list[Packable]:
    return [make_weight(name, 3 + 20 * i, 256, seed=i) for i, name in enumerate(formats)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8_rows", [False, True])
def test_parts_of_different_formats(dtype: torch.dtype, int8_rows: bool) -> None:
    parts = parts_of(INT8_FORMATS if int8_rows else FORMATS)
    whole = torch.cat([dense(part) for part in parts])
    bias = some(len(whole))
    matrix = PackedMatrix(parts, bias, int8_rows)
    assert (matrix.n, matrix.k) == whole.shape
    for rows in (1, 7, 70):
        x = some_rows(rows, dtype, 256)
        check_product(matrix, x, whole, bias, CODE_ROUNDINGS)
        biases = bias.split([part.shape[0] for part in parts])
        single = [
            PackedMatrix(part, used, int8_rows)(x) for part, used in zip(parts, biases, strict=True)
        ]
        assert same_bits(matrix(x), torch.cat(single, 1))


def test_rows_with_any_stride() -> None:
    for format in ("BF16", "Q4_1"):
        weight = make_weight(format, k=64)
        for dtype in DTYPES:
            matrix = PackedMatrix(weight)
            x = some(70, 64).to(dtype)
            expected = matrix(x)
            odd = torch.empty(70, 67, dtype=dtype)
            odd[:, 1:65] = x
            repeated = x[:1].expand(70, 64)
            assert same_bits(matrix(odd[:, 1:65]), expected)
            assert same_bits(matrix(x.T.contiguous().T), expected)
            assert same_bits(matrix(repeated), expected[:1].expand(70, -1).contiguous())


def with_codes(format: str, byte: int) -> StoredMatrix:
    """A weight whose codes all have this byte; its scales are random."""
    blocks = make_weight(format)
    assert isinstance(blocks, StoredMatrix)
    start, end = CODE_BYTES[format]
    data = blocks.blocks.clone().unflatten(1, (-1, BLOCK_FORMATS[format].size))
    data[..., start:end] = byte
    return StoredMatrix(format, data.flatten(1))


@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.parametrize("byte", [0, 0xFF, 0x80, 0x7F])  # in Q8_0: 0, -1, -128 and 127
def test_extreme_codes(format: str, byte: int) -> None:
    """Sums of byte products do not saturate in 16 bits: all x are 127 steps, too.

    Equal inputs have equal rounding errors, so the bound is one rounding for each of them.
    """
    weight = with_codes(format, byte)
    wide = dense(weight)
    # Dot products with unsigned codes add 128, so the result is not exactly zero.
    if not wide.any():
        x = torch.ones(1, INPUTS)
        assert PackedMatrix(weight, int8_rows=True)(x).abs().max() < 1e-4
        return
    signs = torch.tensor([[1.0], [-1.0], [3e-7], [1e20]])
    rows = signs * torch.ones(4, INPUTS)
    alternating = torch.where(torch.arange(INPUTS) % 2 == 0, 1.0, -1.0)[None]
    for x in (rows, alternating, rows.repeat(10, 1)):
        for dtype in DTYPES:
            for int8_rows in (False, True):
                matrix = PackedMatrix(weight, int8_rows=int8_rows)
                check_product(matrix, x.to(dtype), wide, None, INPUTS)


@pytest.mark.parametrize("byte", [0, 0x88, 0x77, 0xFF, 0x7F, 0x80])
def test_extreme_codes_of_mxfp4(byte: int) -> None:
    """The codes are zeros of both signs, 6 and -6."""
    some_scales = some_mxfp4(20, 96, seed=1).scales
    weight = Mxfp4Matrix(torch.full((20, 48), byte, dtype=torch.uint8), some_scales)
    for x in (torch.ones(5, 96), -torch.ones(5, 96)):
        for dtype in DTYPES:
            for int8_rows in (False, True):
                matrix = PackedMatrix(weight, int8_rows=int8_rows)
                check_product(matrix, x.to(dtype), dense(weight), None, 96)


@pytest.mark.parametrize("exponent", [0, 1, 2, 60, 126, 127, 128, 200, 251])
def test_exponents_of_mxfp4(exponent: int) -> None:
    """All codes with subnormal and huge scales; exponent 0 is 2^-127."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(20, 1)
    weight = Mxfp4Matrix(codes | codes.flip(1) << 4, torch.full((20, 1), exponent).byte())
    unit = torch.eye(32)
    assert torch.equal(PackedMatrix(weight)(unit), dense(weight).T)
    assert dense(weight).unique().numel() == 15


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_mxfp4_equals_the_dequantized_matrix(rows: int) -> None:
    weight = some_mxfp4(OUTPUTS, INPUTS)
    dequantized = dense(weight).bfloat16()
    assert torch.equal(dequantized.float(), dense(weight))
    x = some_rows(rows, torch.float32)
    assert same_bits(PackedMatrix(weight)(x), PackedMatrix(dequantized)(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8(fp8: torch.dtype, dtype: torch.dtype) -> None:
    weight = Fp8Matrix(some(OUTPUTS, INPUTS).to(fp8), some(OUTPUTS, seed=3).abs() / 30)
    assert can_pack(weight, dtype)
    for rows in (3, 70):
        x = some_rows(rows, dtype)
        check_product(PackedMatrix(weight, some(OUTPUTS)), x, dense(weight), some(OUTPUTS), 32)


@pytest.mark.parametrize("value", [-128, -127, 127])
def test_extreme_codes_of_int8(value: int) -> None:
    """The code -128 occurs in quantized checkpoints."""
    weight = Int8Matrix(torch.full((20, 96), value, dtype=torch.int8), torch.full((20,), 0.01))
    for x in (torch.ones(5, 96), -torch.ones(5, 96)):
        for dtype in DTYPES:
            check_product(PackedMatrix(weight), x.to(dtype), dense(weight), None, CODE_ROUNDINGS)
            matrix = PackedMatrix(weight, int8_rows=True)
            check_product(matrix, x.to(dtype), dense(weight), None, CODE_ROUNDINGS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("format", "int8_rows"), EVERY_FORMAT)
def test_non_finite_values_stay_in_their_row(
    format: str, dtype: torch.dtype, int8_rows: bool
) -> None:
    matrix = PackedMatrix(make_weight(format), int8_rows=int8_rows)
    x = some_rows(45, dtype).contiguous()
    expected = matrix(x)
    for place in (0, 13, 16, 31, 40, INPUTS - 1):  # in each part of a block of 32
        for value in (float("nan"), float("inf"), -float("inf")):
            for rows in (9, 45):  # few rows and many
                damaged = x[:rows].clone()
                damaged[5, place] = value
                result = matrix(damaged)
                others = torch.arange(rows) != 5
                assert same_bits(result[others], expected[:rows][others])
                if int8_rows or value != value:
                    assert result[5].isnan().all()
                else:
                    assert not result[5].isfinite().any()


@pytest.mark.parametrize("int8_rows", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", INT8_FORMATS)
def test_huge_small_and_zero_rows(format: str, dtype: torch.dtype, int8_rows: bool) -> None:
    weight = make_weight(format)
    matrix = PackedMatrix(weight, int8_rows=int8_rows)
    row = some_rows(1, dtype).float()
    x = (row * torch.tensor([[2.0**100], [1.0], [2.0**-70], [0.0]])).to(dtype)
    result = matrix(x)
    check_product(matrix, x[:3], dense(weight), None, CODE_ROUNDINGS)
    assert (result[3] == 0).all()
    # Scaling by a power of two changes only the exponent.
    assert same_bits(result[0], (result[1].double() * 2.0**100).to(dtype))


def test_which_weights_can_be_packed() -> None:
    exact = some(4, 6).bfloat16()
    assert can_pack(exact) and can_pack(exact.float()) and can_pack(exact, torch.float32)
    assert not can_pack(some(4, 6)) and not can_pack(exact[:, :5])
    assert not can_pack(exact, torch.float16) and not can_pack(exact.half())
    for format in FORMATS[1:]:
        assert can_pack(make_weight(format), torch.float32)
        assert not can_pack(make_weight(format), torch.float16)
