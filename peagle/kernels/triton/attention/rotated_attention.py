"""Rotary embedding, the new keys and values stored, and attention over all keys: one launch.

For passes of few rows, where a launch of rope_store costs more than its work. A program of
attention rotates its queries while it loads them (rotary_rows.py). Before it reads keys, it stores
those of the new rows that it is going to read, and the values:

    first_positions[b] = 62, row_counts[b] = 4, blocks of 64 keys, 8 splits of the keys

    split 0     stores the rows 0 and 1 (positions 62, 63), and reads the keys 0 .. 63
    split 1     stores the rows 2 and 3 (positions 64, 65), and reads the keys 64, 65

Every row attends to itself, so every row is stored. Programs for other queries of the same head
store the same bits; none waits for another. So a request must not read what another one stores in
the same pass (`RowPass.reads_new_keys`). In exact mode, the rows may be those of a tree: the key of
a node belongs to the split of its position.

Results have the bits of attention behind rope_store. Heads with norms are left to rope_store: the
order in which a norm adds depends on the tile, and there is nothing to gain (docs/moe.md).

Shapes: those of rope_store.py and paged_attention.py.
"""

import torch
from torch import Tensor

from peagle.kernels.attention_params import AttentionHeads, AttentionParams
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton import skinny_gemm, uses_triton
from peagle.kernels.triton.attention import paged_attention, rope_store
from peagle.kernels.triton.attention.rotary_rows import Rotation
from peagle.kernels.triton.batch_invariant import paged_attention as invariant

MAX_ROWS = skinny_gemm.MAX_ROWS
# In larger blocks, instructions (wgmma) wait for each other if the queries are computed.
MAX_BLOCK_QUERIES = 32
MAX_TREE_D = 64  # Wider heads of trees need more registers than there are.


def reference(
    qkv: Tensor,
    rows: RowPass,
    rope_table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    heads: AttentionHeads,
    params: AttentionParams,
    out: Tensor | None = None,
) -> Tensor:
    """The same computation in plain PyTorch."""
    query = rope_store.reference(qkv, rows, rope_table, key_cache, value_cache, heads)
    return paged_attention.reference(query, key_cache, value_cache, rows, params, out)


def supports_rotated_attention(
    qkv: Tensor, rows: RowPass, key_cache: Tensor, heads: AttentionHeads, params: AttentionParams
) -> bool:
    """Whether the kernels support this pass, and it has few rows."""
    if not uses_triton(qkv) or qkv.shape[-2] > MAX_ROWS or rows.bidirectional_rows:
        return False
    has_norms = heads.q_norm is not None or heads.k_norm is not None
    if has_norms or rows.reads_new_keys or params.softcap is not None:
        return False
    is_tree = rows.tree_masks is not None
    if is_tree and (not params.batch_invariant or key_cache.shape[2] > MAX_TREE_D):
        return False
    if not params.batch_invariant:
        plan = paged_attention.plan_pass(rows, heads.num_heads, key_cache)
        return plan.block_rows <= MAX_BLOCK_QUERIES
    # Passes in float32 on a GPU are not exact.
    is_exact = key_cache.element_size() == 2 or not qkv.is_cuda
    exact_plan = invariant.plan_pass(rows, heads.num_heads, key_cache)
    return is_exact and exact_plan.block_queries <= MAX_BLOCK_QUERIES


def rotated_attention(
    qkv: Tensor,
    rows: RowPass,
    rope_table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    heads: AttentionHeads,
    params: AttentionParams,
    out: Tensor | None = None,
    split_counters: Tensor | None = None,
) -> Tensor:
    """rope_store and attention in one launch; qkv stays as it is.

    Requires `supports_rotated_attention`. Rows that belong to no request stay what they are in
    `out`, and store nothing, whatever their KV slots are.
    """
    d = key_cache.shape[2]
    rot = rope_table.shape[1]
    assert supports_rotated_attention(qkv, rows, key_cache, heads, params)
    assert qkv.shape[-1] == (heads.num_heads + 2 * heads.num_kv_heads) * d
    assert qkv.dim() == 3 or qkv.dtype == key_cache.dtype
    assert rot % 2 == 0 and 2 <= rot <= d
    assert key_cache.shape == value_cache.shape and key_cache.dtype == value_cache.dtype
    assert qkv.stride(-1) == rope_table.stride(1) == rows.page_tables.stride(1) == 1
    assert key_cache.stride(2) == value_cache.stride(2) == 1
    if out is None:
        shape = (qkv.shape[-2], heads.num_heads, d)
        out = torch.empty(shape, dtype=key_cache.dtype, device=qkv.device)
    rotation = Rotation(qkv, rope_table, heads)
    args = (rotation.query, key_cache, value_cache, rows, params, out, split_counters)
    if params.batch_invariant:
        plan = invariant.plan_pass(rows, heads.num_heads, key_cache)
        invariant.launch_attention(*args, plan, rotation)
    else:
        paged_attention.launch_attention(*args, rotation=rotation)
    return out
