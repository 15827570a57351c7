"""Experts in C equal PyTorch in every format; the bits of a row do not depend on other rows."""

import pytest
import torch
from torch import Tensor

from peagle.kernels.cpu.experts import PackedExperts, PackedMoe, can_pack_experts
from peagle.kernels.cpu.matrix import PackedMatrix
from peagle.kernels.expert_matrices import ExpertMatrices, GatedActivation
from peagle.target.experts.stored_experts import StoredExperts
from tests.support.kernels.comparing import near, some
from tests.support.kernels.expert_layers import EXPERT_FORMATS, some_expert_matrices

pytestmark = pytest.mark.usefixtures("cpu_level")
DTYPES = [torch.float32, torch.bfloat16]
EXPERTS = 6
HIDDEN = 96
INNER = 64
TOP_K = 3
ACTIVATIONS = {
    "swiglu": GatedActivation(),
    "clamped": GatedActivation(interleaved=True, alpha=1.702, limit=0.7, up_shift=1.0),
}


def some_experts(
    format: str, bias: bool = True, hidden: int = HIDDEN, inner: int = INNER
) -> tuple[ExpertMatrices, ExpertMatrices]:
    """The matrices gate_up and down."""
    return (
        some_expert_matrices(format, EXPERTS, 2 * inner, hidden, bias),
        some_expert_matrices(format, EXPERTS, hidden, inner, bias, seed=20),
    )


def some_routes(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Chosen experts and their weights [rows, TOP_K]; expert 2 is never chosen."""
    scores = some(rows, EXPERTS, seed=seed)
    scores[:, 2] = -100
    top = scores.topk(TOP_K)
    return top.indices, top.values.softmax(-1)


def some_rows(count: int, dtype: torch.dtype, hidden: int = HIDDEN) -> Tensor:
    return some(count, hidden, seed=5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("format", EXPERT_FORMATS)
def test_against_pytorch(format: str, activation: str, dtype: torch.dtype) -> None:
    for bias in (False, True):
        matrices = some_experts(format, bias)
        assert can_pack_experts(*matrices, dtype)
        packed = PackedExperts(*matrices, ACTIVATIONS[activation])
        expected = StoredExperts(*matrices, ACTIVATIONS[activation])
        for rows in (1, 5, 70):
            x = some_rows(rows, dtype)
            chosen, weights = some_routes(rows)
            result = packed(x, chosen, weights)
            assert result.std() > 0.05
            near(result, expected(x, chosen, weights), 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", EXPERT_FORMATS)
def test_rows_of_int8(format: str, dtype: torch.dtype) -> None:
    matrices = some_experts(format)
    packed = PackedExperts(*matrices, ACTIVATIONS["clamped"], int8_rows=True)
    assert all(matrix.int8_rows for matrix in (*packed.gate_up, *packed.down))
    x = some_rows(20, dtype)
    routes = some_routes(20)
    result = packed(x, *routes)
    expected = StoredExperts(*matrices, ACTIVATIONS["clamped"])(x, *routes)
    assert (result - expected).float().std() < 0.02 * expected.float().std()
    assert torch.equal(packed(x[7:9], *(route[7:9] for route in routes)), result[7:9])


@pytest.mark.parametrize("format", ["int8", "mxfp4"])
def test_codes_are_not_packed_again_for_rows_of_int8(format: str) -> None:
    matrices = some_experts(format)
    packed = PackedExperts(*matrices, ACTIVATIONS["clamped"])
    expected = PackedExperts(*matrices, ACTIVATIONS["clamped"], int8_rows=True)
    x = some_rows(20, torch.float32)
    routes = some_routes(20)
    before = packed(x, *routes)
    rounded = packed.with_int8_rows()
    assert torch.equal(rounded(x, *routes), expected(x, *routes))
    assert torch.equal(packed(x, *routes), before)
    assert not torch.equal(rounded(x, *routes), before)
    for one, other in zip(packed.down, rounded.down, strict=True):
        assert one.packed[0].data_ptr() == other.packed[0].data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "inner"), [(34, 18), (160, 50), (2, 2)])
def test_sizes_that_are_not_multiples_of_a_block(
    hidden: int, inner: int, dtype: torch.dtype
) -> None:
    for format in ("float", "int8"):
        matrices = some_experts(format, True, hidden, inner)
        packed = PackedExperts(*matrices, ACTIVATIONS["clamped"])
        expected = StoredExperts(*matrices, ACTIVATIONS["clamped"])
        x = some(40, hidden + 6).to(dtype)[:, 3 : hidden + 3]  # rows with gaps between them
        routes = some_routes(40)
        near(packed(x, *routes), expected(x, *routes), 4)
    assert packed(x[:0], *(route[:0] for route in routes)).shape == (0, hidden)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", EXPERT_FORMATS)
def test_bits_depend_only_on_the_row(
    format: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Number and order of rows, experts of other rows and number of threads have no effect."""
    packed = PackedExperts(*some_experts(format), ACTIVATIONS["clamped"])
    x = some_rows(130, dtype)
    chosen, weights = some_routes(130)
    whole = packed(x, chosen, weights)
    order = torch.randperm(130, generator=torch.Generator().manual_seed(0))
    for rows in (*order[:9].split(1), order[:7], order[:40], order):
        assert torch.equal(packed(x[rows], chosen[rows], weights[rows]), whole[rows])
    for threads in (2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        assert torch.equal(packed(x, chosen, weights), whole)
        assert torch.equal(packed(x[:3], chosen[:3], weights[:3]), whole[:3])


def test_more_experts_than_threads() -> None:
    matrices = [
        some_expert_matrices("float", 150, outputs, 32, bias=True, seed=outputs)
        for outputs in (64, 32)
    ]
    packed = PackedExperts(*matrices, ACTIVATIONS["swiglu"])
    expected = StoredExperts(*matrices, ACTIVATIONS["swiglu"])
    x = some_rows(100, torch.float32, 32)
    chosen = some(100, 150).argsort(1)[:, :4]
    assert chosen.unique().numel() > 128
    weights = torch.full((100, 4), 0.25)
    near(packed(x, chosen, weights), expected(x, chosen, weights), 4)


def test_mxfp4_equals_the_dequantized_matrices() -> None:
    matrices = some_experts("mxfp4")
    dequantized = [
        ExpertMatrices(
            torch.stack([part.dense(expert, torch.float32) for expert in range(EXPERTS)]),
            None,
            part.bias,
        )
        for part in matrices
    ]
    stored, dense = (
        PackedExperts(*parts, ACTIVATIONS["clamped"]) for parts in (matrices, dequantized)
    )
    x = some_rows(50, torch.float32)
    routes = some_routes(50)
    assert torch.equal(stored(x, *routes), dense(x, *routes))
    assert stored.nbytes * 3 < dense.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_values_stay_in_their_row(dtype: torch.dtype) -> None:
    packed = PackedExperts(*some_experts("float"), ACTIVATIONS["clamped"])
    x = some_rows(9, dtype)
    routes = some_routes(9)
    whole = packed(x, *routes)
    x[4, 7] = float("nan")
    result = packed(x, *routes)
    others = torch.arange(9) != 4
    assert torch.equal(result[others], whole[others]) and result[4].isnan().all()


def test_invalid_expert_ids_are_ignored() -> None:
    packed = PackedExperts(*some_experts("float"), ACTIVATIONS["swiglu"])
    x = some_rows(3, torch.float32)
    chosen, weights = some_routes(3)
    outside = torch.cat([chosen, torch.tensor([[-1], [EXPERTS], [1 << 40]])], 1)
    more = torch.cat([weights, torch.ones(3, 1)], 1)
    assert torch.equal(packed(x, outside, more), packed(x, chosen, weights))
    assert not packed(x, torch.full((3, 1), -1), torch.ones(3, 1)).any()


def moe_reference(
    packed: PackedExperts, x: Tensor, router: PackedMatrix, normalized: bool
) -> Tensor:
    logits = router(x).float()
    ordered = logits.sort(dim=-1, descending=True, stable=True)
    chosen = ordered.indices[:, :TOP_K]
    weights = logits.softmax(-1).gather(1, chosen)
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return packed(x, chosen, weights)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_router(dtype: torch.dtype, biased: bool, normalized: bool) -> None:
    packed = PackedExperts(*some_experts("float"), ACTIVATIONS["swiglu"])
    bias = some(EXPERTS, seed=10).bfloat16() if biased else None
    router = PackedMatrix(some(EXPERTS, HIDDEN, seed=9).bfloat16() / 4, bias)
    moe = PackedMoe(packed, router, TOP_K, normalized)
    for rows in (1, 33):
        x = some_rows(rows, dtype)
        near(moe(x), moe_reference(packed, x, router, normalized), 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_each_expert_are_counted(dtype: torch.dtype) -> None:
    """The counts describe the last call only."""
    packed = PackedExperts(*some_experts("float"), ACTIVATIONS["swiglu"])
    router = PackedMatrix(some(EXPERTS, HIDDEN, seed=9).bfloat16() / 4)
    counts = torch.full((EXPERTS + 1,), 99, dtype=torch.int32)
    moe = PackedMoe(packed, router, TOP_K, True, counts)
    for rows in (40, 1):
        x = some_rows(rows, dtype)
        moe(x)
        order = router(x).float().sort(dim=-1, descending=True, stable=True).indices
        expected = order[:, :TOP_K].flatten().bincount(minlength=EXPERTS)
        assert counts.tolist() == [*expected.tolist(), int((expected > 0).sum())]


def test_equal_logits_choose_the_first_experts() -> None:
    packed = PackedExperts(*some_experts("float"), ACTIVATIONS["swiglu"])
    bias = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    moe = PackedMoe(packed, PackedMatrix(torch.zeros(EXPERTS, HIDDEN), bias), TOP_K, True)
    x = some_rows(2, torch.float32)
    chosen = torch.tensor([[1, 3, 0]]).expand(2, -1)
    near(moe(x), packed(x, chosen, bias[chosen].softmax(-1)))


@pytest.mark.parametrize("normalized", [False, True])
def test_rows_with_nan_choose_valid_experts(normalized: bool) -> None:
    packed = PackedExperts(*some_experts("float"), ACTIVATIONS["swiglu"])
    moe = PackedMoe(packed, PackedMatrix(torch.ones(EXPERTS, HIDDEN)), EXPERTS, normalized)
    x = some_rows(2, torch.float32)
    x[0, 3] = float("nan")
    assert moe(x)[0].isnan().all() and moe(x)[1].isfinite().all()


def test_which_experts_can_be_packed() -> None:
    gate_up, down = some_experts("float")
    assert can_pack_experts(gate_up, down) and not can_pack_experts(gate_up, down, torch.float16)
    inexact = ExpertMatrices(gate_up.weight + 1e-4)
    odd = ExpertMatrices(down.weight[:, :, 1:])
    assert not can_pack_experts(inexact, down) and not can_pack_experts(gate_up, odd)
    assert can_pack_experts(inexact, down, int8_rows=True)
    codes = ExpertMatrices(torch.zeros(2, 4, 6, dtype=torch.int32), torch.ones(2, 4))
    assert not can_pack_experts(codes, codes)
