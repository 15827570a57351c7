"""Attention over paged keys and values, in an order that the position of a row alone decides.

Rows, pages and visibility are those of attention/paged_attention.py. The keys of a
request are cut into blocks of BLOCK_KEYS by their position, and block i belongs to split
i % KEY_SPLITS. A row runs an online softmax over the blocks of each split in turn, and the splits
are merged in their order:

    KEY_SPLITS 2, a row that sees the blocks 0 .. 4:   (0, 2, 4) merged with (1, 3)

Blocks without a visible key change nothing: their weights are exactly 0, and what came before is
scaled by exactly 1. So neither the other rows of a block of queries nor their number matters. The
weights of a block are added as integers, because the order of a sum over the keys depends on the
number of queries.

With few blocks of queries, every split has its own program, and the last one to finish merges
their results. With many, every program runs over all splits.

A row of a draft tree gets the bits of a chain through its ancestors. Blocks that lie entirely
before the tree are shared by all rows. In the blocks behind them, called the tail, the ancestors of
a row do not lie where a chain would have them:

    first_positions[b] = 66, BLOCK_KEYS = 64, a row at depth 2 with the path 0 1 4

    position         64  65  66  67  68
    KV position      64  65  66  67  70     66 + the row of the ancestor

A tensor core adds 16 keys at once, in no order, so the tail is read in groups of 16 lanes, each of
which holds all keys of one group of 16 positions that some rows need (tree_lanes.py). The lanes are
looked up once per pass. The other rows of the block have weights of 0 for them (tree_tail.py).

Shapes: query and result [T, heads, d], key_cache and value_cache [num_slots, kv_heads, d].
"""

from torch import Tensor

from peagle.kernels.attention_params import AttentionParams
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton import uses_triton
from peagle.kernels.triton.attention.attention_plan import LOG2_E, new_split_counters, split_buffers
from peagle.kernels.triton.attention.rotary_rows import Rotation, rotation_arguments
from peagle.kernels.triton.batch_invariant.attention_plan import (
    AttentionPlan,
    block_sizes,
    plan_attention,
    tail_sizes,
)
from peagle.kernels.triton.batch_invariant.tree_lanes import TreeLanes, tree_lanes
from peagle.kernels.triton.launch.dependent_launch import launch_options

try:
    import triton

    from peagle.kernels.triton.batch_invariant.attention_kernel import invariant_attention_kernel
except ImportError:
    triton = None

KEY_SPLITS = 8


def supports_invariant_attention(query: Tensor, params: AttentionParams, rows: RowPass) -> bool:
    return uses_triton(query) and params.softcap is None and not rows.bidirectional_rows


def invariant_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: RowPass,
    params: AttentionParams,
    out: Tensor,
    split_counters: Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Run the kernel; the contract is that of `paged_attention`, without soft caps."""
    assert supports_invariant_attention(query, params, rows)
    plan = plan or plan_pass(rows, query.shape[1], key_cache)
    launch_attention(query, key_cache, value_cache, rows, params, out, split_counters, plan)
    return out


def plan_pass(rows: RowPass, num_heads: int, key_cache: Tensor) -> AttentionPlan:
    kv_heads = key_cache.shape[1]
    is_tree = rows.tree_masks is not None
    heads_in_batch = len(rows.page_tables) * kv_heads
    return plan_attention(heads_in_batch, rows.max_rows, num_heads // kv_heads, key_cache, is_tree)


def find_lanes(rows: RowPass, num_heads: int, key_cache: Tensor) -> None:
    """Look up the lanes of a tree, if that is not done, with a kernel between this and attention.

    Attention reads them before the kernel in front of it has ended.
    """
    if rows.tree_masks is None:
        return
    sizes = tail_sizes(rows, key_cache.shape[2], plan_pass(rows, num_heads, key_cache))
    assert sizes is not None
    tree_lanes(rows, sizes)


def launch_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: RowPass,
    params: AttentionParams,
    out: Tensor,
    split_counters: Tensor | None,
    plan: AttentionPlan,
    rotation: Rotation | None = None,
) -> None:
    """`rotation`: query is `rotation.query`, and new keys and values are not in the caches yet."""
    counters = new_split_counters(out.device) if split_counters is None else split_counters
    batch = len(rows.page_tables)
    kv_heads = key_cache.shape[1]
    blocks = triton.cdiv(rows.max_rows, plan.block_rows)
    programs = KEY_SPLITS if plan.parallel else 1  # for each block of queries
    sizes = tail_sizes(rows, out.shape[2], plan)
    assert programs == 1 or batch * kv_heads * blocks <= len(counters)
    lanes = (None,) * len(TreeLanes._fields) if sizes is None else tree_lanes(rows, sizes)
    invariant_attention_kernel[(batch, kv_heads, blocks * programs)](
        query,
        key_cache,
        value_cache,
        rows.page_tables,
        rows.row_starts,
        rows.row_counts,
        rows.first_positions,
        query if params.sinks is None else params.sinks,
        rows.positions,
        *lanes,
        out,
        *split_buffers(out, programs),
        counters,
        params.scale * LOG2_E,
        params.window_size,
        rows.page_tables.shape[1],
        *query.stride()[:2],
        *key_cache.stride()[:2],
        *value_cache.stride()[:2],
        rows.page_tables.stride(0),
        *out.stride()[:2],
        SINKS=params.sinks is not None,
        SPLITS=KEY_SPLITS,
        **rotation_arguments(rotation, rows),
        **block_sizes(out, kv_heads, plan, sizes, rows.page_size),
        enable_fp_fusion=False,  # The merges of both kinds of programs must round alike.
        **launch_options(out),
    )
