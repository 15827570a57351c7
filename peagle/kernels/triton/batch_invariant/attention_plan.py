"""AttentionPlan: how the queries of a pass are divided into programs. No bit depends on it."""

from typing import NamedTuple

from torch import Tensor

from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.batch_invariant.tree_lanes import max_depth, num_lanes

try:
    import triton
except ImportError:
    triton = None

MIN_BLOCK_QUERIES = 16
TAIL_LANES = 128  # keys of tree rows that are gathered at once
# With 64 queries, Triton uses another tensor-core instruction (wgmma) than with fewer.
MAX_BLOCK_QUERIES = 64
MAX_BLOCK_QUERIES_FLOAT32 = 32
PARALLEL_PROGRAMS = 100  # blocks of queries that leave room for a program per split
WIDE_PROGRAMS = 16  # blocks of queries whose programs have 8 warps
SMALL_PROGRAMS = 520  # blocks of queries that are not made larger
TREE_BLOCK_ROWS = 4  # whose lanes are one chunk, with heads of up to 64 dimensions
TREE_BLOCK_QUERIES = 32
SMALL_TREE_PROGRAMS = 400  # blocks of a tree's queries that are not made larger


class AttentionPlan(NamedTuple):
    block_rows: int  # rows of a request in a block
    block_queries: int  # rows x heads of a group, padded
    parallel: bool  # a program for each split
    num_warps: int = 8


def plan_attention(
    heads_in_batch: int, max_rows: int, group: int, cache: Tensor, is_tree: bool
) -> AttentionPlan:
    """How many rows a block has, and whether splits have their own programs. No bit depends on it.

    Measured on an H200. Small blocks and parallel splits spread a small batch over the GPU; large
    blocks share the keys that they read.
    """
    smallest = max(MIN_BLOCK_QUERIES, triton.next_power_of_2(group))
    block_rows = smallest // group
    if is_tree:
        block_rows = min(block_rows, TREE_BLOCK_ROWS)
    programs = heads_in_batch * triton.cdiv(max_rows, block_rows)
    if programs <= PARALLEL_PROGRAMS:
        warps = 8 if programs <= WIDE_PROGRAMS and not is_tree else 4
        return AttentionPlan(block_rows, smallest, True, warps)
    if is_tree:
        if programs > SMALL_TREE_PROGRAMS:
            smallest = max(smallest, TREE_BLOCK_QUERIES)
            block_rows = smallest // group
        return AttentionPlan(block_rows, smallest, False, 4)
    most = MAX_BLOCK_QUERIES if cache.element_size() == 2 else MAX_BLOCK_QUERIES_FLOAT32
    wanted = 16
    while programs > SMALL_PROGRAMS and wanted < min(most, max_rows * group):
        wanted *= 2
        programs = heads_in_batch * triton.cdiv(max_rows, max(wanted // group, 1))
    queries = max(smallest, wanted)
    return AttentionPlan(queries // group, queries, False, 4 if queries <= 64 else 8)


def block_sizes(
    out: Tensor, kv_heads: int, rows: RowPass, plan: AttentionPlan
) -> dict[str, int | bool]:
    heads, d = out.shape[1:]
    is_tree = rows.tree_masks is not None
    return {
        "HEADS": heads,
        "GROUP": heads // kv_heads,
        "D": d,
        "PARALLEL": plan.parallel,
        **tree_sizes(rows, d, plan.block_rows),
        "BLOCK_ROWS": plan.block_rows,
        "BLOCK_QUERIES": plan.block_queries,
        "BLOCK_KEYS": 64 if d <= 128 else 32,
        "BLOCK_D": max(16, triton.next_power_of_2(d)),
        "num_warps": plan.num_warps,
        "num_stages": 3 if plan.block_queries == 64 and not is_tree else 2,
    }


def tree_sizes(rows: RowPass, d: int, block_rows: int) -> dict[str, int | bool]:
    if rows.tree_masks is None:
        sizes = {"DEPTH": 0, "LANES": 16, "BLOCK_NODES": 16, "BLOCK_LANES": 16}
        return {"TREE": False, "ONE_CHUNK": True, **sizes}
    lanes = num_lanes(rows)
    limit = TAIL_LANES if d <= 64 else TAIL_LANES // 2
    block_lanes = min(triton.next_power_of_2(block_rows * lanes), limit)
    block_lanes = max(block_lanes, triton.next_power_of_2(lanes))  # at least one row
    return {
        "TREE": True,
        "ONE_CHUNK": block_rows * lanes <= block_lanes,
        "DEPTH": max_depth(rows),
        "LANES": lanes,
        "BLOCK_NODES": max(16, triton.next_power_of_2(rows.max_rows)),
        "BLOCK_LANES": block_lanes,
    }
