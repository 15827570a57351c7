"""The router of a mixture: which experts compute each row, and which rows each expert computes.

    logits = x weight^T + bias, rounded to x's dtype
    experts = the TOP_K largest, the first of equal ones
    weights = softmax of the logits, over all experts or (`normalized`) over the chosen ones

    logits (1 3 2 0), top_k 2, normalized  ->  experts (1 2), weights (0.73 0.27)

An assignment a = row * top_k + rank is one of a row's experts. The rows of an expert are, in any
order and as assignments, `table[expert, : counts[expert]]`. `touched[: counts[-1]]` lists the
experts that have rows. None of this is known on the host: the experts' kernels read it on the
device.

A program multiplies 16 rows, or one of a few, with the router rows of some experts, over a part of
the inputs. The last program of a block of rows adds the parts in a fixed order, chooses the
experts, and enters its assignments into the table.

Shapes: x [T, K], weight [E, K], bias [E]. Results: experts and weights [T, top_k], table [E, T].
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from peagle.kernels.triton import uses_triton
from peagle.kernels.triton.launch.dependent_launch import launch_options

try:
    import triton
    import triton.language as tl

    from peagle.kernels.triton.launch.dependent_launch import launch_next, wait_for_inputs
except ImportError:  # without Triton the reference runs
    triton = None

BLOCK_ROWS = 16
BLOCK_EXPERTS = 16
BLOCK_INPUTS = 256
SPLIT_INPUTS = 256  # the fewest inputs of one program
BUSY_PROGRAMS = 528  # programs that keep a GPU busy: with so many rows the inputs are not split


@dataclass(frozen=True, slots=True)
class RouterParams:
    top_k: int
    normalized: bool  # whether the weights of the chosen experts sum to 1


@dataclass(frozen=True, slots=True)
class Routing:
    experts: Tensor  # [T, top_k] int32
    weights: Tensor  # [T, top_k] float32, rounded to the rows' dtype
    counts: Tensor  # [E + 1] int32: rows of each expert; last: the number of touched experts
    table: Tensor  # [E, T] int32: the assignments of each expert
    touched: Tensor  # [min(E, T * top_k)] int32: experts with rows


def choose_experts(
    x: Tensor, weight: Tensor, bias: Tensor | None, params: RouterParams
) -> tuple[Tensor, Tensor]:
    """Experts and weights in plain PyTorch."""
    logits = linear(x, weight, bias).float()
    top = logits.sort(dim=-1, descending=True, stable=True)
    chosen = top.values[:, : params.top_k]
    total = chosen if params.normalized else logits
    weights = (chosen - total.logsumexp(-1, keepdim=True)).exp()
    return top.indices[:, : params.top_k].int(), weights.to(x.dtype).float()


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, params: RouterParams, counts: Tensor
) -> Routing:
    """The same computation in plain PyTorch. `counts` must be zero and is overwritten."""
    experts, weights = choose_experts(x, weight, bias, params)
    num_experts = len(weight)
    flat = experts.flatten().long()
    order = flat.argsort(stable=True)
    sizes = flat.bincount(minlength=num_experts)
    starts = sizes.cumsum(0) - sizes
    table = torch.zeros(num_experts, len(x), dtype=torch.int32, device=x.device)
    places = torch.arange(len(flat), device=x.device) - starts[flat[order]]
    table[flat[order], places] = order.int()
    touched = sizes.nonzero()[:, 0].int()
    counts[:-1] = sizes
    counts[-1] = len(touched)
    return Routing(experts, weights, counts, table, touched)


if triton is not None:

    @triton.jit
    def _sort_keys(scores, all_experts, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
        """Integers in the order of the scores; among equal scores, the first expert is largest.

        The upper half is the score, the lower half the expert. A score in bf16 has 16 bits.
        """
        bits = scores.to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        if WIDE:
            keys = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - all_experts)
        else:
            keys = (ordered & -65536) | (0xFFFF - all_experts)
        return keys

    @triton.jit
    def _key_score(key, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
        if WIDE:
            ordered = (key >> 32).to(tl.int32)
            bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
        else:
            ordered = key & -65536
            bits = ordered ^ ((ordered >> 31) & 0x7FFF0000)
        return bits.to(tl.float32, bitcast=True)

    @triton.jit
    def _key_expert(key, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
        low = 0x7FFFFFFF - (key & 0xFFFFFFFF) if WIDE else 0xFFFF - (key & 0xFFFF)
        return low.to(tl.int32)

    @triton.jit
    def _choose_experts(  # type: ignore[no-untyped-def]
        scores,
        all_experts,
        NORMALIZED: tl.constexpr,
        WIDE: tl.constexpr,
        TOP_K: tl.constexpr,
        RANKS: tl.constexpr,
    ):
        """scores [rows, experts] -> the chosen experts and their weights, [rows, RANKS]."""
        rank = tl.arange(0, RANKS)[None, :]
        highest = tl.max(scores, 1)
        chosen = tl.zeros([scores.shape[0], RANKS], tl.int32)
        weights = tl.zeros([scores.shape[0], RANKS], tl.float32)
        keys = _sort_keys(scores, all_experts, WIDE)
        lowest: tl.constexpr = -0x7FFFFFFFFFFFFFFF if WIDE else -0x7FFFFFFF
        for i in tl.static_range(TOP_K):
            key = tl.max(keys, 1)
            expert = _key_expert(key, WIDE)
            weight = tl.exp(_key_score(key, WIDE) - highest)
            chosen = tl.where(rank == i, expert[:, None], chosen)
            weights = tl.where(rank == i, weight[:, None], weights)
            keys = tl.where(all_experts == expert[:, None], lowest, keys)
        total = tl.sum(weights, 1)
        if not NORMALIZED:
            total = tl.sum(tl.exp(scores - highest[:, None]), 1)
        return chosen, weights / total[:, None]

    @triton.jit
    def _group_rows(  # type: ignore[no-untyped-def]
        experts,
        mask,
        assignment,
        rank,
        counts_ptr,
        table_ptr,
        touched_ptr,
        rows,
        EXPERTS: tl.constexpr,
        TOP_K: tl.constexpr,
        ONE_ROW: tl.constexpr,
    ):
        """Enter assignments into the table, beside other programs; a single row has no others."""
        if ONE_ROW:
            place = tl.zeros_like(experts)
            is_first = mask
            index = place + rank
            tl.store(counts_ptr + experts, place + 1, mask=mask)
            tl.store(counts_ptr + EXPERTS, TOP_K)
        else:
            place = tl.atomic_add(counts_ptr + experts, 1, mask=mask)
            is_first = mask & (place == 0)
            index = tl.atomic_add(counts_ptr + EXPERTS + tl.zeros_like(place), 1, mask=is_first)
        tl.store(table_ptr + experts.to(tl.int64) * rows + place, assignment, mask=mask)
        tl.store(touched_ptr + index, experts, mask=is_first)

    @triton.jit
    def finish_routing(  # type: ignore[no-untyped-def]
        scores,
        all_experts,
        t,
        row_mask,
        bias_ptr,
        experts_ptr,
        weights_ptr,
        counts_ptr,
        table_ptr,
        touched_ptr,
        rows,
        dtype: tl.constexpr,
        EXPERTS: tl.constexpr,
        TOP_K: tl.constexpr,
        NORMALIZED: tl.constexpr,
        BIAS: tl.constexpr,
        ONE_ROW: tl.constexpr,
        RANKS: tl.constexpr,
    ):
        """Choose the experts of the rows t by their scores [rows, experts], and group the rows."""
        if BIAS:
            scores += tl.load(bias_ptr + all_experts, mask=all_experts < EXPERTS, other=0.0).to(
                tl.float32
            )
        scores = scores.to(dtype).to(tl.float32)
        # NaN would be sorted by its sign, behind experts that do not exist.
        is_valid = (all_experts < EXPERTS) & (scores == scores)
        scores = tl.where(is_valid, scores, float("-inf"))
        experts, weights = _choose_experts(
            scores, all_experts, NORMALIZED, dtype != tl.bfloat16, TOP_K, RANKS
        )
        rank = tl.arange(0, RANKS)[None, :]
        assignment = t[:, None] * TOP_K + rank
        mask = row_mask[:, None] & (rank < TOP_K)
        tl.store(experts_ptr + assignment, experts, mask=mask)
        tl.store(weights_ptr + assignment, weights.to(dtype).to(tl.float32), mask=mask)
        _group_rows(
            experts,
            mask,
            assignment,
            rank,
            counts_ptr,
            table_ptr,
            touched_ptr,
            rows,
            EXPERTS,
            TOP_K,
            ONE_ROW,
        )

    @triton.jit
    def _route_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        weight_ptr,
        bias_ptr,
        parts_ptr,
        arrived_ptr,
        experts_ptr,
        weights_ptr,
        counts_ptr,
        table_ptr,
        touched_ptr,
        rows,
        stride_x_row,
        split_inputs,
        K: tl.constexpr,
        EXPERTS: tl.constexpr,
        TOP_K: tl.constexpr,
        NORMALIZED: tl.constexpr,
        BIAS: tl.constexpr,
        PARTS: tl.constexpr,
        SPLITS: tl.constexpr,
        ONE_ROW: tl.constexpr,
        RANKS: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_E: tl.constexpr,
        BLOCK_K: tl.constexpr,
        ALL_EXPERTS: tl.constexpr,
        DEPENDENT: tl.constexpr,
    ):
        block = tl.program_id(0)
        part = tl.program_id(1)
        split = tl.program_id(2)
        t = block * BLOCK_T + tl.arange(0, BLOCK_T)
        row_mask = t < rows
        e = part * BLOCK_E + tl.arange(0, BLOCK_E)
        expert_mask = e < EXPERTS
        first = split * split_inputs
        if BLOCK_T == 1:  # The inputs are split so that a program has one block of them.
            k = first + tl.arange(0, BLOCK_K)
            weight = tl.load(
                weight_ptr + e[:, None] * K + k[None, :],
                mask=expert_mask[:, None] & (k < K)[None, :],
                other=0.0,
            )
            wait_for_inputs(DEPENDENT)
            launch_next(DEPENDENT)
            x = tl.load(
                x_ptr + t[:, None].to(tl.int64) * stride_x_row + k[None, :],
                mask=row_mask[:, None] & (k < K)[None, :],
                other=0.0,
            )
            total = tl.sum(weight.to(tl.float32) * x.to(tl.float32), 1)[None, :]
        else:
            wait_for_inputs(DEPENDENT)
            launch_next(DEPENDENT)
            total = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
            for start in range(first, tl.minimum(first + split_inputs, K), BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                x = tl.load(
                    x_ptr + t[:, None].to(tl.int64) * stride_x_row + k[None, :],
                    mask=row_mask[:, None] & (k < K)[None, :],
                    other=0.0,
                )
                weight = tl.load(
                    weight_ptr + e[None, :] * K + k[:, None],
                    mask=expert_mask[None, :] & (k < K)[:, None],
                    other=0.0,
                )
                total = tl.dot(x, weight, total, input_precision="ieee")
        part_ptr = parts_ptr + (split * rows + t[:, None]) * EXPERTS + e[None, :]
        tl.store(part_ptr, total, mask=row_mask[:, None] & expert_mask[None, :])
        tl.debug_barrier()  # Every thread has stored.
        if PARTS * SPLITS > 1:
            if tl.atomic_add(arrived_ptr + block, 1) < PARTS * SPLITS - 1:
                return
            tl.store(arrived_ptr + block, 0)  # for the next launch

        all_experts = tl.arange(0, ALL_EXPERTS)[None, :]
        in_range = row_mask[:, None] & (all_experts < EXPERTS)
        scores = tl.zeros([BLOCK_T, ALL_EXPERTS], tl.float32)
        for i in tl.static_range(SPLITS):
            part_ptr = parts_ptr + (i * rows + t[:, None]) * EXPERTS + all_experts
            scores += tl.load(part_ptr, mask=in_range, other=0.0, cache_modifier=".cg")
        finish_routing(
            scores,
            all_experts,
            t,
            row_mask,
            bias_ptr,
            experts_ptr,
            weights_ptr,
            counts_ptr,
            table_ptr,
            touched_ptr,
            rows,
            x_ptr.dtype.element_ty,
            EXPERTS,
            TOP_K,
            NORMALIZED,
            BIAS,
            ONE_ROW,
            RANKS,
        )


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    params: RouterParams,
    counts: Tensor,
    arrived: Tensor,
) -> Routing:
    """`counts` [E + 1] must be zero. `arrived` [>= max(T / 16, 16)] is zero before and after.

    Both are int32.
    """
    if not uses_triton(x):
        return reference(x, weight, bias, params, counts)
    routing = empty_routing(len(x), counts, params)
    _launch(x, weight, bias, params, routing, arrived)
    return routing


def empty_routing(rows: int, counts: Tensor, params: RouterParams) -> Routing:
    """Tensors for the kernel to fill."""
    num_experts = len(counts) - 1
    return Routing(
        counts.new_empty(rows, params.top_k),
        counts.new_empty(rows, params.top_k, dtype=torch.float32),
        counts,
        counts.new_empty(num_experts, rows),
        counts.new_empty(min(num_experts, rows * params.top_k)),
    )


def num_splits(programs: int, inputs: int) -> int:
    """How many programs share the inputs of what one of these would compute."""
    most = triton.cdiv(inputs, SPLIT_INPUTS)
    return most if programs <= BUSY_PROGRAMS // most else triton.cdiv(BUSY_PROGRAMS, programs)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    params: RouterParams,
    routing: Routing,
    arrived: Tensor,
) -> None:
    rows, inputs = x.shape
    num_experts = len(weight)
    block_t = 1 if rows <= BLOCK_ROWS else BLOCK_ROWS
    blocks = triton.cdiv(rows, block_t)
    parts = triton.cdiv(num_experts, BLOCK_EXPERTS)
    # A program of one row reads one block of inputs, whatever the number of programs.
    one_block = triton.cdiv(inputs, BLOCK_INPUTS)
    splits = one_block if block_t == 1 else num_splits(blocks * parts, inputs)
    assert x.stride(1) == 1 and weight.is_contiguous() and len(routing.counts) == num_experts + 1
    assert routing.counts.is_contiguous() and len(arrived) >= blocks
    _route_kernel[(blocks, parts, splits)](
        x,
        weight,
        x if bias is None else bias,
        torch.empty(splits, rows, num_experts, dtype=torch.float32, device=x.device),
        arrived,
        routing.experts,
        routing.weights,
        routing.counts,
        routing.table,
        routing.touched,
        rows,
        x.stride(0),
        triton.cdiv(inputs, splits * BLOCK_INPUTS) * BLOCK_INPUTS,
        K=inputs,
        EXPERTS=num_experts,
        TOP_K=params.top_k,
        NORMALIZED=params.normalized,
        BIAS=bias is not None,
        PARTS=parts,
        SPLITS=splits,
        ONE_ROW=rows == 1,
        RANKS=triton.next_power_of_2(params.top_k),
        BLOCK_T=block_t,
        BLOCK_E=BLOCK_EXPERTS,
        BLOCK_K=BLOCK_INPUTS,
        ALL_EXPERTS=max(triton.next_power_of_2(num_experts), 2),
        num_warps=1 if block_t == 1 else 4,  # One warp chooses without barriers.
        num_stages=3,
        **launch_options(x),
    )
