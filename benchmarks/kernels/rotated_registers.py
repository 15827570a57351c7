"""Registers, spills and shared memory of attention that rotates its rows. Needs no GPU.

    PYTHONPATH=. python -m benchmarks.kernels.rotated_registers [smollm2,8b,gpt-oss-20b]

The kernels that the rules choose for passes of a few rows are compiled for sm_90, beside those that
run behind a rotation of their own. The last line counts kernels that spill.
"""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.exact_registers import CompiledKernels, new_pass
from peagle.kernels.attention_params import AttentionHeads, AttentionParams
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.attention import paged_attention, rotated_attention
from peagle.kernels.triton.attention.attention_plan import new_split_counters
from peagle.kernels.triton.batch_invariant import paged_attention as invariant
from peagle.kernels.triton.batch_invariant import tree_lanes

MODULES = (paged_attention, invariant, rotated_attention, tree_lanes)
PASSES = ((1, 1, 0), (1, 8, 0), (8, 1, 0), (8, 8, 0))  # requests, rows, tree depth
TREE_PASSES = ((1, 16, 7), (1, 32, 11), (2, 16, 7), (2, 32, 11))  # in exact mode


@dataclass(frozen=True, slots=True)
class LayerShape:
    num_heads: int
    kv_heads: int
    d: int
    partial_sums: int  # of the qkv product (skinny_gemm.num_splits)
    sinks: bool = False
    window: int | None = None


SHAPES = {
    "smollm2": LayerShape(9, 3, 64, 1),
    "8b": LayerShape(32, 8, 128, 2),
    "gpt-oss-20b": LayerShape(64, 8, 64, 3, sinks=True, window=128),
}


def run_layer(shape: LayerShape, rows: RowPass, exact: bool, rotates: bool) -> Tensor | None:
    heads = AttentionHeads(shape.num_heads, shape.kv_heads)
    sinks = torch.empty(shape.num_heads, dtype=torch.bfloat16) if shape.sinks else None
    params = AttentionParams(shape.d**-0.5, shape.window, None, sinks, batch_invariant=exact)
    cache = torch.empty(64, shape.kv_heads, shape.d, dtype=torch.bfloat16)
    counters = new_split_counters(cache.device)
    width = (shape.num_heads + 2 * shape.kv_heads) * shape.d
    qkv = torch.empty(shape.partial_sums, len(rows.positions), width)
    if shape.partial_sums == 1:
        qkv = qkv[0].bfloat16()
    if rotates:
        if not rotated_attention.supports_rotated_attention(qkv, rows, cache, heads, params):
            return None
        table = torch.empty(4096, shape.d)
        args = (qkv, rows, table, cache, cache, heads, params)
        return rotated_attention.rotated_attention(*args, split_counters=counters)
    query = torch.empty(len(rows.positions), shape.num_heads, shape.d, dtype=torch.bfloat16)
    attend = invariant.invariant_attention if exact else paged_attention.paged_attention
    return attend(query, cache, cache, rows, params, query, counters)


def main() -> None:
    names = sys.argv[1].split(",") if len(sys.argv) > 1 else list(SHAPES)
    compiled = CompiledKernels(MODULES)
    spilled = 0
    for name in names:
        for exact in (False, True):
            for requests, count, depth in PASSES + TREE_PASSES * exact:
                rows = new_pass(requests, count, depth)
                for rotates in (False, True):
                    mode = f"{'exact' if exact else 'fast'}, {'rotated' if rotates else 'separate'}"
                    label = f"{name} {requests} x {count}{' tree' if depth else ''} {mode}"
                    spilled += compiled.print_kernel(
                        label,
                        lambda: run_layer(SHAPES[name], rows, exact, rotates),  # noqa: B023
                    )
    print(f"{spilled} kernels spill")


if __name__ == "__main__":
    main()
