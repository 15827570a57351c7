"""The products of a mixture's experts, for the rows that the router gave them (route.py).

    gate_up:  x [T, d], matrices [E, 2I, d]  ->  hidden [T * top_k, I], one row per assignment
    down:     hidden, matrices [E, d, I]     ->  parts [splits * top_k, T, d]

The gated activation runs in the launch that computes its inputs, gates and ups in turn. The second
product is multiplied with the weight of its assignment; what is left to do is the sum over the
parts, which the kernel that reads the result adds (add_norm). If few experts are touched, several
programs split the inputs of the second product, and each has its own parts.

A program computes some outputs of one touched expert for all of its rows, so that each matrix is
read once: memory bandwidth is the limit for the few rows of a step. If an expert has more rows than
a block holds, its matrix is read again for the next block. The order in which a number is summed
depends on the matrix and on the number of rows of the pass, not on the experts of other rows.

An 8-bit weight is converted to x's dtype before the product, which is exact, and its scale
multiplies the sum. MXFP4 weights: mxfp4.py.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from peagle.kernels.expert_matrices import MXFP4_BLOCK, ExpertMatrices, GatedActivation
from peagle.kernels.mxfp4_tiles import TILE_BYTES
from peagle.kernels.triton import uses_triton
from peagle.kernels.triton.experts import tiles as tiling
from peagle.kernels.triton.experts.route import Routing
from peagle.kernels.triton.experts.tiles import ExpertTiles
from peagle.kernels.triton.launch.dependent_launch import launch_options

try:
    import triton
    import triton.language as tl

    from peagle.kernels.triton.experts.mxfp4 import multiply_codes, multiply_tiles
    from peagle.kernels.triton.launch.dependent_launch import launch_next, wait_for_inputs
except ImportError:  # without Triton the reference runs
    triton = None

WIDE_PART_ROWS = 1024  # with more rows, parts are in x's dtype instead of float32
NO_LIMIT = 3.0e38


def reference_gate_up(
    x: Tensor, matrices: ExpertMatrices, activation: GatedActivation, routing: Routing
) -> Tensor:
    """The same computation in plain PyTorch."""
    top_k = routing.experts.shape[1]
    rows = x.repeat_interleave(top_k, 0)
    return activation(reference_products(rows, matrices, routing))


def reference_down(hidden: Tensor, matrices: ExpertMatrices, routing: Routing) -> Tensor:
    """The same computation in plain PyTorch."""
    out = reference_products(hidden, matrices, routing).float()
    weighted = out * routing.weights.flatten()[:, None]
    parts = weighted.unflatten(0, routing.experts.shape).transpose(0, 1)
    return parts.to(part_dtype(len(routing.experts), hidden.dtype)).contiguous()


def reference_products(
    rows: Tensor,
    matrices: ExpertMatrices,
    routing: Routing,
) -> Tensor:
    """rows [T * top_k, K] -> [T * top_k, N], each with the matrix of its expert."""
    flat = routing.experts.flatten()
    out = torch.zeros(len(rows), matrices.outputs, dtype=rows.dtype, device=rows.device)
    for expert in flat.unique().tolist():
        own = flat == expert
        bias = None if matrices.bias is None else matrices.bias[expert].to(rows.dtype)
        out[own] = linear(rows[own], matrices.dense(expert, rows.dtype), bias)
    return out


def part_dtype(rows: int, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if rows <= WIDE_PART_ROWS else dtype


if triton is not None:
    _NO_LIMIT = tl.constexpr(NO_LIMIT)

    @triton.jit
    def _load_weight(  # type: ignore[no-untyped-def]
        weight_ptr, n, n_mask, k, WIDTH: tl.constexpr, EVEN: tl.constexpr
    ):
        """[N, K]: the rows n of a matrix, at the inputs k."""
        ptr = weight_ptr + n[:, None] * WIDTH + k[None, :]
        if EVEN:
            return tl.load(ptr)
        return tl.load(ptr, mask=n_mask[:, None] & (k < WIDTH)[None, :], other=0.0)

    @triton.jit
    def _load_rows(  # type: ignore[no-untyped-def]
        x_ptr, row, row_mask, stride_x_row, k, WIDTH: tl.constexpr
    ):
        """[K, rows]: rows of x, at the inputs k."""
        return tl.load(
            x_ptr + row[None, :] * stride_x_row + k[:, None],
            mask=row_mask[None, :] & (k < WIDTH)[:, None],
            other=0.0,
        )

    @triton.jit
    def _multiply(  # type: ignore[no-untyped-def]
        x_ptr,
        row,
        row_mask,
        stride_x_row,
        weight_ptr,
        n,
        n_mask,
        first_block,
        end_block,
        WIDTH: tl.constexpr,
        EVEN: tl.constexpr,
        BLOCK_K: tl.constexpr,
    ):
        """[N, rows]: the products of rows of x with the rows n of a matrix, over some inputs."""
        total = tl.zeros([n.shape[0], row.shape[0]], tl.float32)
        for block in range(first_block, end_block):
            k = block * BLOCK_K + tl.arange(0, BLOCK_K)
            weight = _load_weight(weight_ptr, n, n_mask, k, WIDTH, EVEN)
            x = _load_rows(x_ptr, row, row_mask, stride_x_row, k, WIDTH)
            total = tl.dot(weight.to(x.dtype), x, total, input_precision="ieee")
        return total

    @triton.jit
    def _expert_kernel(  # type: ignore[no-untyped-def]
        x_ptr,
        weight_ptr,
        scales_ptr,
        bias_ptr,
        out_ptr,
        counts_ptr,
        touched_ptr,
        table_ptr,
        factors_ptr,
        rows,
        stride_x_row,
        split_blocks,
        alpha,
        limit,
        up_shift,
        EXPERTS: tl.constexpr,
        TOP_K: tl.constexpr,
        N: tl.constexpr,
        MATRIX_ROWS: tl.constexpr,
        MATRIX_SIZE: tl.constexpr,
        SCALES_SIZE: tl.constexpr,
        INPUTS: tl.constexpr,
        WIDTH: tl.constexpr,
        INTERLEAVED: tl.constexpr,
        GATED: tl.constexpr,
        BIAS: tl.constexpr,
        SCALED: tl.constexpr,
        MXFP4: tl.constexpr,
        TILED: tl.constexpr,
        EVEN: tl.constexpr,
        ONE_ROW: tl.constexpr,
        BLOCK_T: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_K: tl.constexpr,
        DEPENDENT: tl.constexpr,
    ):
        wait_for_inputs(DEPENDENT)
        place = tl.program_id(1)
        expert = tl.load(touched_ptr + place).to(tl.int64)
        if ONE_ROW:  # Each of its experts has one assignment: one look-up instead of three.
            count = 1
        else:
            touched = tl.load(counts_ptr + EXPERTS)
            if place >= touched:
                return
            count = tl.load(counts_ptr + expert)
        split = tl.program_id(2)
        first_block = split * split_blocks
        end_block = tl.minimum(first_block + split_blocks, (WIDTH + BLOCK_K - 1) // BLOCK_K)
        # Rows of the matrix; of a gated one, gates and ups in turn.
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        n_mask = n < MATRIX_ROWS
        if GATED and not INTERLEAVED:
            n = n // 2 + n % 2 * (MATRIX_ROWS // 2)
        weight_ptr += expert * MATRIX_SIZE
        scales_ptr += expert * SCALES_SIZE
        bias_ptr += expert * MATRIX_ROWS
        for start in range(0, count, BLOCK_T):
            place_in_block = start + tl.arange(0, BLOCK_T)
            mask = place_in_block < count
            if ONE_ROW:
                assignment = place_in_block * 0 + place
            else:
                assignment = tl.load(table_ptr + expert * rows + place_in_block, mask=mask, other=0)
            assignment = assignment.to(tl.int64)
            row = assignment // TOP_K
            x_row = row if GATED else assignment
            if TILED:
                total = multiply_tiles(
                    x_ptr,
                    x_row,
                    mask,
                    stride_x_row,
                    weight_ptr,
                    scales_ptr,
                    tl.where(n_mask, n, 0),
                    first_block,
                    end_block,
                    INPUTS,
                )
            elif MXFP4:
                total = multiply_codes(
                    x_ptr,
                    x_row,
                    mask,
                    stride_x_row,
                    weight_ptr,
                    scales_ptr,
                    n,
                    n_mask,
                    first_block,
                    end_block,
                    WIDTH,
                    BLOCK_K,
                )
            else:
                total = _multiply(
                    x_ptr,
                    x_row,
                    mask,
                    stride_x_row,
                    weight_ptr,
                    n,
                    n_mask,
                    first_block,
                    end_block,
                    WIDTH,
                    EVEN,
                    BLOCK_K,
                )
            launch_next(DEPENDENT)
            if SCALED:
                total *= tl.load(scales_ptr + n, mask=n_mask, other=0.0)[:, None]
            if BIAS:
                bias = tl.load(bias_ptr + n, mask=n_mask & (split == 0), other=0.0)
                total += bias.to(tl.float32)[:, None]
            if GATED:
                dtype = x_ptr.dtype.element_ty
                pairs = tl.reshape(total.to(dtype), (BLOCK_N // 2, 2, BLOCK_T))
                gate, up = tl.split(tl.permute(pairs, (0, 2, 1)))
                gate = tl.minimum(gate.to(tl.float32), limit)
                up = tl.minimum(tl.maximum(up.to(tl.float32), -limit), limit)
                result = gate / (1.0 + tl.exp(-alpha * gate)) * (up + up_shift)
                output = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
                out_row = assignment
            else:
                factor = tl.load(factors_ptr + assignment, mask=mask, other=0.0)
                result = total * factor[None, :]
                output = n
                out_row = (split * TOP_K + assignment % TOP_K) * rows + row
            tl.store(
                out_ptr + out_row[None, :] * N + output[:, None],
                result.to(out_ptr.dtype.element_ty),
                mask=(output < N)[:, None] & mask[None, :],
            )


def expert_gate_up(
    x: Tensor,
    matrices: ExpertMatrices,
    activation: GatedActivation,
    routing: Routing,
    tiles: ExpertTiles | None = None,
) -> Tensor:
    """[T * top_k, I]. The rows of x may lie apart, but must be contiguous."""
    if not uses_triton(x):
        return reference_gate_up(x, matrices, activation, routing)
    out = torch.empty(
        routing.experts.numel(), matrices.outputs // 2, dtype=x.dtype, device=x.device
    )
    _launch(x, matrices, activation, routing, out, tiles, splits=1)
    return out


def expert_down(
    hidden: Tensor, matrices: ExpertMatrices, routing: Routing, tiles: ExpertTiles | None = None
) -> Tensor:
    """Parts [splits * top_k, T, d] in float32; for many rows in x's dtype."""
    if not uses_triton(hidden):
        return reference_down(hidden, matrices, routing)
    rows, top_k = routing.experts.shape
    splits = tiling.num_splits(matrices, rows * top_k)
    out = torch.empty(
        (splits * top_k, rows, matrices.outputs),
        dtype=part_dtype(rows, hidden.dtype),
        device=hidden.device,
    )
    _launch(hidden, matrices, None, routing, out, tiles, splits)
    return out


def _launch(
    x: Tensor,
    matrices: ExpertMatrices,
    activation: GatedActivation | None,
    routing: Routing,
    out: Tensor,
    tiles: ExpertTiles | None,
    splits: int,
) -> None:
    rows, top_k = routing.experts.shape
    matrix_rows = matrices.outputs
    width = row_elements(matrices)
    shape = activation or GatedActivation()
    block_t = tiling.block_rows(matrices, rows * top_k / matrices.num_experts, rows)
    tiles = tiles or tiling.tile_sizes(matrices, block_t, rows * top_k, activation is not None)
    split_blocks = triton.cdiv(width, splits * tiles.block_k)
    assert matrices.weight.is_contiguous() and x.stride(1) == 1 and x.shape[1] == matrices.inputs
    assert not matrices.is_mxfp4 or tiles.block_k % (MXFP4_BLOCK // 2) == 0
    if matrices.is_tiled:
        assert x.is_cuda and x.dtype == torch.bfloat16 and tiles.block_k == TILE_BYTES
    _expert_kernel[(triton.cdiv(matrix_rows, tiles.block_n), len(routing.touched), splits)](
        x,
        matrices.weight,
        x if matrices.scales is None else matrices.scales,
        x if matrices.bias is None else matrices.bias,
        out,
        routing.counts,
        routing.touched,
        routing.table,
        routing.weights,
        rows,
        x.stride(0),
        split_blocks,
        shape.alpha,
        NO_LIMIT if shape.limit is None else shape.limit,
        shape.up_shift,
        TOP_K=top_k,
        N=out.shape[-1],
        INTERLEAVED=shape.interleaved,
        GATED=activation is not None,
        **_format_options(matrices),
        EVEN=matrix_rows % tiles.block_n == 0 and width % tiles.block_k == 0,
        ONE_ROW=rows == 1,
        BLOCK_T=block_t,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch_options(x),
    )


def row_elements(matrices: ExpertMatrices) -> int:
    """Elements of a stored row: inputs, or bytes of MXFP4."""
    if matrices.is_tiled:
        return matrices.weight.shape[2] * TILE_BYTES
    return matrices.weight.shape[2]


def _format_options(matrices: ExpertMatrices) -> dict[str, int]:
    """What the kernel must know of the matrices."""
    scales = matrices.scales
    return {
        "EXPERTS": matrices.num_experts,
        "MATRIX_ROWS": matrices.outputs,
        "MATRIX_SIZE": matrices.weight[0].numel(),
        "SCALES_SIZE": 0 if scales is None else scales[0].numel(),
        "INPUTS": matrices.inputs,
        "WIDTH": row_elements(matrices),
        "BIAS": matrices.bias is not None,
        "SCALED": scales is not None and not matrices.is_mxfp4,
        "MXFP4": matrices.is_mxfp4,
        "TILED": matrices.is_tiled,
    }
