"""The norm in front of a mixture and its router, in one launch, for a few rows.

    total = x + residual
    normed = norm(total)              as in add_norm.py
    routing = router of norm(total)   as in route.py

A program multiplies one row with the router rows of some experts, over a part of the inputs, before
the sum of the row's squares is known: the norm multiplies all logits of a row by one number, so the
last program of the row does that when it has added the parts. It then chooses the experts, and
writes the normed row. A kernel of its own for the norm would take as long as the router.

The logits are those of a norm that is not rounded to the rows' dtype before the product; where two
experts are nearly equal, route.py may choose the other one.

Shapes: x [T, K] or partial sums [S, T, K], residual [T, K], norm [K]; router weight [E, K], bias
[E]. Results: normed and total [T, K], and the Routing of route.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.kernels.triton import add_norm, uses_triton
from peagle.kernels.triton.experts import route
from peagle.kernels.triton.experts.route import RouterParams, Routing, empty_routing
from peagle.kernels.triton.launch.dependent_launch import launch_options

try:
    import triton
    import triton.language as tl

    from peagle.kernels.triton.experts.route import finish_routing
    from peagle.kernels.triton.launch.dependent_launch import launch_next, wait_for_inputs
except ImportError:  # without Triton the reference runs
    triton = None

MAX_ROWS = 16  # A program has one row; with more of them, route.py reads the router less often.
NUM_WARPS = 4


@dataclass(frozen=True, slots=True)
class NormedRouting:
    routing: Routing
    normed: Tensor  # [T, K]
    total: Tensor  # [T, K]


def reference(
    x: Tensor,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    params: RouterParams,
    counts: Tensor,
) -> NormedRouting:
    """The same computation in plain PyTorch, with logits of the rounded norm."""
    normed, total = add_norm.reference(x, residual, norm, eps)
    return NormedRouting(route.reference(normed, weight, bias, params, counts), normed, total)


def supports_norm_route(x: Tensor, residual: Tensor, weight: Tensor) -> bool:
    """Whether the kernel runs here; x has so few rows that it is faster."""
    narrow = residual.dtype == weight.dtype and x.stride(-1) == residual.stride(1) == 1
    return uses_triton(x) and x.shape[-2] <= MAX_ROWS and narrow


if triton is not None:

    @triton.jit
    def _norm_route_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        residual_ptr,
        norm_ptr,
        weight_ptr,
        bias_ptr,
        parts_ptr,
        arrived_ptr,
        total_ptr,
        normed_ptr,
        experts_ptr,
        weights_ptr,
        counts_ptr,
        table_ptr,
        touched_ptr,
        rows,
        eps,
        stride_x_sum,
        stride_x_row,
        stride_residual_row,
        K: tl.constexpr,
        SUMS: tl.constexpr,
        EXPERTS: tl.constexpr,
        TOP_K: tl.constexpr,
        NORMALIZED: tl.constexpr,
        BIAS: tl.constexpr,
        PARTS: tl.constexpr,
        SPLITS: tl.constexpr,
        ONE_ROW: tl.constexpr,
        RANKS: tl.constexpr,
        BLOCK_E: tl.constexpr,
        BLOCK_K: tl.constexpr,
        ALL_EXPERTS: tl.constexpr,
        ALL_INPUTS: tl.constexpr,
        DEPENDENT: tl.constexpr,
    ):
        row = tl.program_id(0)
        part = tl.program_id(1)
        split = tl.program_id(2)
        e = part * BLOCK_E + tl.arange(0, BLOCK_E)
        k = split * BLOCK_K + tl.arange(0, BLOCK_K)
        k_mask = k < K
        weight = tl.load(
            weight_ptr + e[:, None] * K + k[None, :],
            mask=(e < EXPERTS)[:, None] & k_mask[None, :],
            other=0.0,
        )
        norm = tl.load(norm_ptr + k, mask=k_mask, other=0.0).to(tl.float32)
        wait_for_inputs(DEPENDENT)
        launch_next(DEPENDENT)
        x_row_ptr = x_ptr + row * stride_x_row + k
        total = tl.load(x_row_ptr, mask=k_mask, other=0.0)
        for i in tl.static_range(1, SUMS):
            total += tl.load(x_row_ptr + i * stride_x_sum, mask=k_mask, other=0.0)
        residual = tl.load(residual_ptr + row * stride_residual_row + k, mask=k_mask, other=0.0)
        dtype = residual.dtype
        total = (total.to(dtype).to(tl.float32) + residual.to(tl.float32)).to(dtype)
        scaled = total.to(tl.float32) * norm
        logits = tl.sum(weight.to(tl.float32) * scaled[None, :], 1)
        tl.store(parts_ptr + (split * rows + row) * EXPERTS + e, logits, mask=e < EXPERTS)
        tl.store(total_ptr + row * K + k, total, mask=k_mask & (part == 0))
        tl.debug_barrier()  # Every thread has stored.
        if PARTS * SPLITS > 1:
            if tl.atomic_add(arrived_ptr + row, 1) < PARTS * SPLITS - 1:
                return
            tl.store(arrived_ptr + row, 0)  # for the next launch

        inputs = tl.arange(0, ALL_INPUTS)
        input_mask = inputs < K
        all_experts = tl.arange(0, ALL_EXPERTS)[None, :]
        scores = tl.zeros([1, ALL_EXPERTS], tl.float32)
        for i in tl.static_range(SPLITS):
            part_ptr = parts_ptr + (i * rows + row) * EXPERTS + all_experts
            scores += tl.load(part_ptr, mask=all_experts < EXPERTS, other=0.0, cache_modifier=".cg")
        whole = tl.load(
            total_ptr + row * K + inputs, mask=input_mask, other=0.0, cache_modifier=".cg"
        ).to(tl.float32)
        scale = tl.rsqrt(tl.sum(whole * whole, 0) / K + eps)
        whole_norm = tl.load(norm_ptr + inputs, mask=input_mask, other=0.0).to(tl.float32)
        normed = whole_norm * (whole * scale).to(dtype).to(tl.float32)
        tl.store(normed_ptr + row * K + inputs, normed.to(dtype), mask=input_mask)
        t = row + tl.zeros([1], tl.int32)
        finish_routing(
            scores * scale,
            all_experts,
            t,
            t < rows,
            bias_ptr,
            experts_ptr,
            weights_ptr,
            counts_ptr,
            table_ptr,
            touched_ptr,
            rows,
            dtype,
            EXPERTS,
            TOP_K,
            NORMALIZED,
            BIAS,
            ONE_ROW,
            RANKS,
        )


def norm_route(
    x: Tensor,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    params: RouterParams,
    counts: Tensor,
    arrived: Tensor,
) -> NormedRouting:
    """See `supports_norm_route`; `counts` and `arrived` as in route.py."""
    rows = len(residual)
    constants = _constants(len(weight), weight.shape[1], params)
    routing = empty_routing(rows, counts, params)
    normed = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    total = torch.empty_like(normed)
    splits = constants["SPLITS"]
    logit_parts = torch.empty(splits, rows, len(weight), dtype=torch.float32, device=x.device)
    assert weight.is_contiguous() and len(counts) == len(weight) + 1 and len(arrived) >= rows
    _norm_route_kernel[(rows, constants["PARTS"], splits)](
        x,
        residual,
        norm,
        weight,
        x if bias is None else bias,
        logit_parts,
        arrived,
        total,
        normed,
        routing.experts,
        routing.weights,
        routing.counts,
        routing.table,
        routing.touched,
        rows,
        eps,
        x.stride(0),
        x.stride(-2),
        residual.stride(0),
        SUMS=len(x) if x.dim() == 3 else 1,
        BIAS=bias is not None,
        ONE_ROW=rows == 1,
        num_warps=NUM_WARPS,
        **constants,
        **launch_options(x),
    )
    return NormedRouting(routing, normed, total)


def _constants(num_experts: int, inputs: int, params: RouterParams) -> dict[str, int]:
    """Sizes of the kernel for a router [num_experts, inputs]."""
    return {
        "K": inputs,
        "EXPERTS": num_experts,
        "TOP_K": params.top_k,
        "NORMALIZED": params.normalized,
        "PARTS": triton.cdiv(num_experts, route.BLOCK_EXPERTS),
        "SPLITS": triton.cdiv(inputs, route.BLOCK_INPUTS),
        "RANKS": triton.next_power_of_2(params.top_k),
        "BLOCK_E": route.BLOCK_EXPERTS,
        "BLOCK_K": route.BLOCK_INPUTS,
        "ALL_EXPERTS": max(triton.next_power_of_2(num_experts), 2),
        "ALL_INPUTS": triton.next_power_of_2(inputs),
    }
