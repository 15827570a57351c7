"""AttentionPlan: how the queries of a pass are divided into programs. No bit depends on it."""

from typing import NamedTuple

from torch import Tensor

from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.batch_invariant.tree_lanes import LaneSizes, lane_sizes

try:
    import triton
except ImportError:
    triton = None

MIN_BLOCK_QUERIES = 16
TAIL_LANES = 128  # keys of tree rows that are read at once, where there are no more (tree_tail.py)
LOOP_LANES = 64  # otherwise
# With 64 queries, Triton uses another tensor-core instruction (wgmma) than with fewer.
MAX_BLOCK_QUERIES = 64
MAX_BLOCK_QUERIES_FLOAT32 = 32
PARALLEL_PROGRAMS = 100  # blocks of queries that leave room for a program per split
WIDE_PROGRAMS = 16  # blocks of queries whose programs have 8 warps
SMALL_PROGRAMS = 520  # blocks of queries that are not made larger
PARALLEL_TREE_PROGRAMS = 200  # the same for trees
WIDE_TREE_PROGRAMS = 32
# Of a thread with 64 queries of 64 dimensions, so that three programs share a multiprocessor: then
# the 384 programs of 64 requests with trees, for 3 heads of keys, run at once.
TREE_REGISTERS = 168


class AttentionPlan(NamedTuple):
    block_rows: int  # rows of a request in a block
    block_queries: int  # rows x heads of a group, padded
    parallel: bool  # a program for each split
    num_warps: int = 8
    tail_lanes: int = TAIL_LANES
    one_page: bool = False  # Look up one page for a block of keys, where it lies in one.
    early_values: bool = False  # of the first block of a parallel split, with its keys
    num_stages: int = 0  # of loops that load ahead; 0: by the number of queries
    max_registers: int = 0  # of a thread: the fewer, the more programs fit; 0: no limit


def plan_attention(
    heads_in_batch: int, max_rows: int, group: int, cache: Tensor, is_tree: bool
) -> AttentionPlan:
    """How many rows a block has, and whether splits have their own programs. No bit depends on it.

    Measured on an H200. Small blocks and parallel splits spread a small batch over the GPU; large
    blocks share the keys that they read.
    """
    smallest = max(MIN_BLOCK_QUERIES, triton.next_power_of_2(group))
    most = MAX_BLOCK_QUERIES if cache.element_size() == 2 else MAX_BLOCK_QUERIES_FLOAT32
    programs = heads_in_batch * triton.cdiv(max_rows, smallest // group)
    if is_tree:
        d = cache.shape[-1]
        return plan_trees(programs, max_rows, group, smallest, max(smallest, most), d)
    if programs <= WIDE_PROGRAMS:
        return without_lookahead(AttentionPlan(smallest // group, smallest, True, 8))
    if programs <= PARALLEL_PROGRAMS:
        return AttentionPlan(smallest // group, smallest, True, 4)
    wanted = 16
    while programs > SMALL_PROGRAMS and wanted < min(most, max_rows * group):
        wanted *= 2
        programs = heads_in_batch * triton.cdiv(max_rows, max(wanted // group, 1))
    queries = max(smallest, wanted)
    warps = 4 if queries <= 64 else 8
    return AttentionPlan(queries // group, queries, False, warps, one_page=True)


def without_lookahead(plan: AttentionPlan) -> AttentionPlan:
    """For few programs: most splits have one block of keys, and no loop has to load ahead."""
    return plan._replace(one_page=True, early_values=True, num_stages=1)


def even_rows(max_rows: int, most: int) -> int:
    """Rows of a block, so that no block has many fewer: of 32 rows, 16 and 16 instead of 21, 11."""
    return -(-max_rows // -(-max_rows // most))


def plan_trees(
    programs: int, max_rows: int, group: int, smallest: int, largest: int, d: int
) -> AttentionPlan:
    """`programs`: blocks of the smallest number of queries.

    Large programs are no slower alone, but they leave no room for those of the next kernel, which
    load weights while they wait (skinny_gemm.py): that decides for wide heads.
    """
    if programs > PARALLEL_TREE_PROGRAMS:
        if d > 64 and programs <= SMALL_PROGRAMS:
            queries = min(2 * smallest, largest)
            return AttentionPlan(queries // group, queries, False, 4, TAIL_LANES)
        if d > 64:
            return AttentionPlan(largest // group, largest, False, 4, LOOP_LANES)
        rows = even_rows(max_rows, largest // group)
        return AttentionPlan(rows, largest, False, 4, LOOP_LANES, max_registers=TREE_REGISTERS)
    few = programs <= PARALLEL_PROGRAMS and d <= 64
    if few and programs <= WIDE_TREE_PROGRAMS:
        return without_lookahead(AttentionPlan(smallest // group, smallest, True, 8))
    return AttentionPlan(smallest // group, smallest, True, 4, TAIL_LANES if few else LOOP_LANES)


def block_keys(d: int) -> int:
    """The keys of a block. They decide the bits of a row."""
    return 64 if d <= 128 else 32


def block_sizes(
    out: Tensor, kv_heads: int, plan: AttentionPlan, lanes: LaneSizes | None, page_size: int
) -> dict[str, int | bool | None]:
    """`lanes`: those of a tree."""
    heads, d = out.shape[1:]
    stages = plan.num_stages or (3 if plan.block_queries == 64 and lanes is None else 2)
    limits = {"maxnreg": plan.max_registers} if plan.max_registers else {}
    return {
        "HEADS": heads,
        "GROUP": heads // kv_heads,
        "D": d,
        "PAGE_SIZE": page_size,
        "ONE_PAGE": plan.one_page and page_size % block_keys(d) == 0,
        "EARLY_VALUES": plan.early_values,
        "PARALLEL": plan.parallel,
        "TREE": lanes is not None,
        "TAIL_BLOCKS": lanes.key_blocks if lanes else 0,
        "LANE_CAPACITY": lanes.capacity if lanes else 0,
        "BLOCK_LANES": lanes.tile if lanes else 0,
        "LOOP_LANES": min(lanes.tile, LOOP_LANES) if lanes else 0,
        "TAIL_STAGES": 1 if plan.max_registers else None,
        "BLOCK_ROWS": plan.block_rows,
        "BLOCK_QUERIES": plan.block_queries,
        "BLOCK_KEYS": block_keys(d),
        "BLOCK_D": max(16, triton.next_power_of_2(d)),
        "num_warps": plan.num_warps,
        "num_stages": stages,
        **limits,
    }


def tail_sizes(rows: RowPass, d: int, plan: AttentionPlan) -> LaneSizes | None:
    """The lanes of a tree; None: the rows are chains."""
    if rows.tree_masks is None:
        return None
    return lane_sizes(rows, plan.block_rows, block_keys(d), plan.tail_lanes)
