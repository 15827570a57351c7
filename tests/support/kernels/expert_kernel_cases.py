"""Cases of the kernels of mixtures of experts, for tests/support/kernels/kernel_cases.py."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from peagle.kernels.expert_matrices import (
    MAX_FAST_SCALE,
    ExpertMatrices,
    GatedActivation,
    decode_mxfp4,
)
from peagle.kernels.triton.experts import expert_gemm, norm_route, route
from peagle.kernels.triton.experts.route import RouterParams, Routing
from peagle.kernels.triton.experts.tiles import ExpertTiles
from tests.support.kernels.comparing import near, some

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

SWIGLU = GatedActivation()
GPT_OSS = GatedActivation(interleaved=True, alpha=1.702, limit=1.5, up_shift=1.0)
FORMATS = (None, torch.int8, torch.float8_e4m3fn, "mxfp4")
SPARE_COUNTERS = 3  # elements of `arrived` that no block of rows uses


# The router.


def new_counters(experts: int, rows: int, device: str) -> tuple[Tensor, Tensor]:
    """`counts` and `arrived`, zero."""
    blocks = max(-(-rows // route.BLOCK_ROWS), route.BLOCK_ROWS) + SPARE_COUNTERS
    counts = torch.zeros(experts + 1, dtype=torch.int32, device=device)
    return counts, torch.zeros(blocks, dtype=torch.int32, device=device)


def whole(*shape: int, seed: int = 0) -> Tensor:
    """Small integers, whose products are exact in any order; many are equal."""
    return (some(*shape, seed=seed) * 1.2).round().clamp(-2, 2)


def check_grouping(routing: Routing) -> None:
    """`counts`, `table` and `touched` are those of `experts`, in any order."""
    chosen = routing.experts.flatten()
    num_experts = len(routing.table)
    sizes = chosen.long().bincount(minlength=num_experts)
    assert routing.counts.tolist() == [*sizes.tolist(), int((sizes > 0).sum())]
    for expert in range(num_experts):
        own = (chosen == expert).nonzero()[:, 0]
        assert routing.table[expert, : len(own)].sort().values.tolist() == own.tolist()
    touched = routing.touched[: routing.counts[-1]].sort().values
    assert touched.tolist() == sizes.nonzero()[:, 0].tolist()


def check_route(
    rows: int, d: int, experts: int, params: RouterParams, bias: bool, device: str, dtype: Any
) -> None:
    x = whole(rows, 2 * d).to(device, dtype)[:, d:]  # rows apart
    weight = (whole(experts, d) / 16).to(device, dtype)
    biases = (whole(experts, seed=1) / 16).to(device, dtype) if bias else None
    expected = route.reference(x, weight, biases, params, new_counters(experts, rows, device)[0])
    _, arrived = new_counters(experts, rows, device)
    for _ in range(2):  # The second launch finds the counters of the first.
        counts, _ = new_counters(experts, rows, device)
        routing = route.route(x, weight, biases, params, counts, arrived)
        assert torch.equal(routing.experts, expected.experts)
        near(routing.weights.to(dtype), expected.weights.to(dtype))
        assert routing.weights.dtype == torch.float32 and routing.counts is counts
        check_grouping(routing)
        assert not arrived.any()
    sums = routing.weights.sum(1)
    assert (sums > 0.97).all() if params.normalized else (sums < 0.97).any()


def check_norm_route(
    rows: int,
    d: int,
    experts: int,
    params: RouterParams,
    bias: bool,
    sums: int,
    device: str,
    dtype: Any,
) -> None:
    """The router reads one input for each expert, and these inputs are far apart."""
    inputs = torch.arange(experts) * (d // experts)
    x = some(sums, rows, d)
    residual = some(rows, 2 * d)[:, d:]
    ranks = torch.stack([some(experts, seed=row).argsort() for row in range(rows)])
    x[:, :, inputs] = (ranks - experts / 2) / 4 / sums
    residual[:, inputs] = 0.0
    weight = torch.zeros(experts, d)
    weight[torch.arange(experts), inputs] = 0.5
    norm = torch.full((d,), 3.0, device=device, dtype=dtype)
    norm[inputs] = 0.75
    x = (x if sums > 1 else x[0].to(dtype)).to(device)
    residual = residual.to(device, dtype)
    weight = weight.to(device, dtype)
    biases = (whole(experts, seed=1) / 16).to(device, dtype) if bias else None
    counts, arrived = new_counters(experts, rows, device)
    expected = norm_route.reference(x, residual, norm, 1e-5, weight, biases, params, counts)
    for _ in range(2):  # The second launch finds the counters of the first.
        counts, _ = new_counters(experts, rows, device)
        assert norm_route.supports_norm_route(x, residual, weight)
        routed = norm_route.norm_route(
            x, residual, norm, 1e-5, weight, biases, params, counts, arrived
        )
        near(routed.total, expected.total)
        near(routed.normed, expected.normed)
        assert torch.equal(routed.routing.experts, expected.routing.experts)
        near(routed.routing.weights.to(dtype), expected.routing.weights.to(dtype))
        check_grouping(routed.routing)
        assert not arrived.any()


def check_route_ties(rows: int, experts: int, top_k: int, device: str, dtype: Any) -> None:
    """All experts are equal except one that is better."""
    x = torch.ones(rows, 16, device=device, dtype=dtype)
    weight = torch.full((experts, 16), -0.5, device=device, dtype=dtype)
    weight[experts - 2] = 0.25
    params = RouterParams(top_k, normalized=True)
    routing = route.route(x, weight, None, params, *new_counters(experts, rows, device))
    assert routing.experts.tolist() == [[experts - 2, *range(top_k - 1)]] * rows
    check_grouping(routing)


def check_route_not_finite(rows: int, experts: int, device: str, dtype: Any) -> None:
    """Rows that are not finite get experts that exist, and do not change the other rows."""
    x = some(rows, 40).to(device, dtype)
    params = RouterParams(2, normalized=True)
    weight = some(experts, 40).to(device, dtype)
    expected = route.route(x, weight, None, params, *new_counters(experts, rows, device))
    broken = x.clone()
    for row, value in enumerate((torch.nan, -torch.nan, torch.inf, -torch.inf)):
        broken[row] = value
    routing = route.route(broken, weight, None, params, *new_counters(experts, rows, device))
    assert (routing.experts >= 0).all() and (routing.experts < experts).all()
    assert torch.equal(routing.experts[4:], expected.experts[4:])
    assert torch.equal(routing.weights[4:], expected.weights[4:])
    check_grouping(routing)


if triton is not None:

    @triton.jit
    def _narrow_kernel(  # type: ignore[no-untyped-def]
        scores_ptr,
        experts_ptr,
        weights_ptr,
        EXPERTS: tl.constexpr,
        TOP_K: tl.constexpr,
        NORMALIZED: tl.constexpr,
        ROWS: tl.constexpr,
        RANKS: tl.constexpr,
    ):
        """The choice of a route kernel in bfloat16, on scores in float32."""
        row = tl.arange(0, ROWS)[:, None]
        all_experts = tl.arange(0, EXPERTS)[None, :]
        scores = tl.load(scores_ptr + row * EXPERTS + all_experts)
        experts, weights = route._choose_experts(
            scores, all_experts, NORMALIZED, False, TOP_K, RANKS
        )
        rank = tl.arange(0, RANKS)[None, :]
        tl.store(experts_ptr + row * RANKS + rank, experts)
        tl.store(weights_ptr + row * RANKS + rank, weights)


def check_narrow_keys(
    experts: int, top_k: int, normalized: bool, device: str, dtype: torch.dtype
) -> None:
    """Sort keys of 32 bits, for scores in bfloat16: the interpreter has no products in bfloat16."""
    rows, ranks = 16, triton.next_power_of_2(top_k)
    scores = (some(rows, experts) * 3).bfloat16().float()
    scores[0] = -1.5  # all equal
    scores[1, ::3] = 2.5
    scores[2] = scores[2].abs().neg()
    scores[3] *= 2.0**-20
    scores = scores.to(device)
    chosen = torch.empty(rows, ranks, dtype=torch.int32, device=device)
    weights = torch.empty(rows, ranks, device=device)
    _narrow_kernel[(1,)](scores, chosen, weights, experts, top_k, normalized, rows, ranks)
    eye = torch.eye(experts, device=device)
    expected = route.choose_experts(scores, eye, None, RouterParams(top_k, normalized))
    assert torch.equal(chosen[:, :top_k], expected[0])
    near(weights[:, :top_k], expected[1])


# The experts.


def some_routing(
    rows: int, experts: int, top_k: int, device: str, dtype: torch.dtype, favored: float = 0.0
) -> Routing:
    """Random experts; `favored`: what is added to the score of expert 1."""
    scores = some(rows, experts)
    scores[:, 1] += favored
    eye = torch.eye(experts).to(device, dtype)
    counters = new_counters(experts, rows, device)
    params = RouterParams(top_k, normalized=True)
    return route.route(scores.to(device, dtype), eye, None, params, *counters)


def some_matrices(
    format: Any, shape: tuple[int, int, int], biased: bool, device: str, dtype: torch.dtype
) -> ExpertMatrices:
    """Random matrices whose products with random rows are about 1."""
    experts, outputs, inputs = shape
    dense = some(*shape) / inputs**0.5
    bias = (some(experts, outputs, seed=1) / 2).to(device, dtype) if biased else None
    if format is None:
        return ExpertMatrices(dense.to(device, dtype), None, bias)
    if format == "mxfp4":
        codes = random_bytes(0, 256, experts, outputs, inputs // 2)
        scales = random_bytes(120, 126, experts, outputs, inputs // 32)
        return ExpertMatrices(codes.to(device), scales.to(device), bias).for_gpu(dtype)
    largest = 127.0 if format == torch.int8 else 448.0
    scales = dense.abs().amax(-1) / largest
    codes = dense / scales[..., None]
    codes = (codes.round() if format == torch.int8 else codes).to(format)
    return ExpertMatrices(codes.to(device), scales.to(device), bias)


def random_bytes(low: int, high: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def check_experts(
    format: Any,
    rows: int,
    experts: int,
    top_k: int,
    d: int,
    inner: int,
    activation: GatedActivation,
    biased: bool,
    device: str,
    dtype: torch.dtype,
    favored: float = 0.0,
    tiles: ExpertTiles | None = None,
) -> None:
    """Compare both products with the references in float32, for the same routing."""
    routing = some_routing(rows, experts, top_k, device, dtype, favored)
    if favored:
        assert routing.counts[1] == rows
    x = some(rows, 2 * d).to(device, dtype)[:, d:]  # rows apart
    gate_up = some_matrices(format, (experts, 2 * inner, d), biased, device, dtype)
    down = some_matrices(format, (experts, d, inner), biased, device, dtype)
    tiles = None if gate_up.is_tiled else tiles  # MXFP4 tiles are used as stored.
    hidden = expert_gemm.expert_gate_up(x, gate_up, activation, routing, tiles)
    expected = expert_gemm.reference_gate_up(x.float(), gate_up, activation, routing)
    near(hidden, expected.to(dtype), 6)
    parts = expert_gemm.expert_down(hidden, down, routing, tiles)
    expected = expert_gemm.reference_down(hidden.float(), down, routing)
    assert parts.dtype == expert_gemm.part_dtype(rows, dtype)
    by_rank = parts.float().unflatten(0, (-1, top_k)).sum(0)
    near(by_rank.to(dtype), expected.to(dtype), 4)


def check_mxfp4_codes(largest: int, device: str, dtype: torch.dtype) -> None:
    """Products with rows of an identity are the weights, bit for bit: all codes and many scales."""
    rows, outputs = 64, 80
    codes = torch.arange(256, dtype=torch.uint8).repeat(outputs * rows // 512).view(outputs, -1)
    scales = random_bytes(90, largest + 1, outputs, rows // 32)
    scales[0] = largest
    both_codes, both_scales = (torch.stack([x, x]).to(device) for x in (codes, scales))
    matrices = ExpertMatrices(both_codes, both_scales)
    routing = some_routing(rows, 2, 1, device, dtype)
    parts = expert_gemm.expert_down(
        torch.eye(rows).to(device, dtype), matrices.for_gpu(dtype), routing
    )
    expected = decode_mxfp4(codes, scales, dtype).to(device)
    assert torch.equal(parts.sum(0).to(dtype), expected.T)


def check_independent_rows(format: Any, device: str, dtype: torch.dtype) -> None:
    """The bits of a row do not depend on the rows beside it, up to a block of them."""
    experts, top_k, d, inner = 4, 2, 192, 96
    params = RouterParams(top_k, normalized=True)
    x = some(route.BLOCK_ROWS, d).to(device, dtype)
    router = some(experts, d).to(device, dtype)
    gate_up = some_matrices(format, (experts, 2 * inner, d), True, device, dtype)
    down = some_matrices(format, (experts, d, inner), True, device, dtype)

    def run(rows: Tensor) -> Tensor:
        counters = new_counters(experts, len(rows), device)
        routing = route.route(rows, router, None, params, *counters)
        hidden = expert_gemm.expert_gate_up(rows, gate_up, SWIGLU, routing)
        return expert_gemm.expert_down(hidden, down, routing)

    together = run(x)
    for start, count in ((0, 1), (5, 1), (2, 3), (4, 8)):
        assert torch.equal(run(x[start : start + count]), together[:, start : start + count])


SMALL_TILES = ExpertTiles(block_n=16, block_k=16, num_warps=4, num_stages=2)
ROUTE_CASES = {
    "route": partial(check_route, 5, 300, 8, RouterParams(2, True), False),
    "route, one row": partial(check_route, 1, 40, 4, RouterParams(3, False), True),
    "route, over all experts": partial(check_route, 16, 64, 20, RouterParams(3, False), True),
    "route, few rows, wide": partial(check_route, 10, 2048, 128, RouterParams(8, True), False),
    "route, two blocks": partial(check_route, 17, 600, 33, RouterParams(8, True), False),
    "route, several blocks": partial(check_route, 37, 300, 60, RouterParams(8, False), True),
    "route, many blocks": partial(check_route, 257, 40, 6, RouterParams(1, False), False),
    "route, one expert": partial(check_route, 3, 16, 1, RouterParams(1, True), False),
    "route, ties": partial(check_route_ties, 5, 6, 3),
    "route, ties, several blocks": partial(check_route_ties, 20, 40, 8),
    "route, not finite": partial(check_route_not_finite, 7, 8),
    "route, not finite, odd": partial(check_route_not_finite, 20, 6),
    "route, narrow keys": partial(check_narrow_keys, 32, 4, True),
    "route, narrow keys, all experts": partial(check_narrow_keys, 64, 8, False),
    "route, narrow keys, one rank": partial(check_narrow_keys, 8, 1, False),
}
NORM_ROUTE_CASES = {
    "norm and route": partial(check_norm_route, 5, 300, 8, RouterParams(2, True), False, 3),
    "norm and route, one row": partial(
        check_norm_route, 1, 600, 20, RouterParams(8, True), False, 8
    ),
    "norm and route, whole rows": partial(
        check_norm_route, 16, 70, 32, RouterParams(4, False), True, 1
    ),
}
EXPERT_CASES = {
    f"experts, {format}": partial(check_experts, format, 6, 4, 2, 64, 96, SWIGLU, False)
    for format in FORMATS
}
EXPERT_CASES |= {
    f"experts, {format}, odd sizes": partial(check_experts, format, 7, 5, 3, 96, 160, GPT_OSS, True)
    for format in FORMATS
}
EXPERT_CASES |= {
    f"experts, {format}, many rows": partial(
        check_experts, format, 40, 8, 2, 96, 32, activation, True, favored=99.0
    )
    for format, activation in zip(FORMATS, (SWIGLU, GPT_OSS, SWIGLU, GPT_OSS), strict=True)
}
EXPERT_CASES |= {
    "experts, sizes of no tile": partial(check_experts, None, 9, 3, 1, 50, 37, GPT_OSS, True),
    "experts, one expert": partial(check_experts, torch.int8, 150, 2, 2, 48, 33, SWIGLU, False),
    "experts, one row": partial(check_experts, None, 1, 4, 1, 32, 16, SWIGLU, True),
    "experts, small tiles": partial(
        check_experts, "mxfp4", 5, 3, 2, 96, 64, SWIGLU, True, tiles=SMALL_TILES
    ),
    "experts, narrow parts": partial(
        check_experts, None, expert_gemm.WIDE_PART_ROWS + 1, 2, 1, 32, 16, SWIGLU, False
    ),
    "experts, codes": partial(check_mxfp4_codes, MAX_FAST_SCALE),
    "experts, codes, large scales": partial(check_mxfp4_codes, 200),
}
CASES = ROUTE_CASES | NORM_ROUTE_CASES | EXPERT_CASES
