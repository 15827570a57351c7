"""The C kernels, called with tensors.

Each function computes what the entry point of the same name in peagle/kernels/triton documents.
It returns None (or False) where the C kernel does not support its arguments; PyTorch then computes
the result.
"""

import torch
from torch import Tensor

from peagle.kernels.attention_params import AttentionHeads, AttentionParams
from peagle.kernels.cpu.library import DTYPE_SUFFIXES, Library, library
from peagle.kernels.cpu.threads import kernel_threads
from peagle.kernels.row_pass import RowPass

# As in c/attention.h:
MAX_HEAD_DIM = 256
MAX_GROUP_SIZE = 64  # query heads per key/value head


def library_for(*tensors: Tensor | None) -> Library | None:
    """The library, if it supports these tensors.

    They must lie on the CPU, share a dtype that has C kernels, and have contiguous rows.
    """
    first = tensors[0]
    assert first is not None
    if first.device.type != "cpu" or first.dtype not in DTYPE_SUFFIXES:
        return None
    if any(x is not None and (x.dtype != first.dtype or x.stride(-1) != 1) for x in tensors):
        return None
    return library()


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    lib = library_for(x, residual, weight, out)
    if lib is None:
        return None
    rows, d = x.shape
    normed = torch.empty(rows, d, dtype=x.dtype) if out is None else out
    total = x if residual is None else torch.empty(rows, d, dtype=x.dtype)
    lib.functions["add_norm", x.dtype](
        x.data_ptr(),
        pointer(residual),
        weight.data_ptr(),
        normed.data_ptr(),
        total.data_ptr(),
        rows,
        d,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        normed.stride(0),
        total.stride(0),
        eps,
        kernel_threads(),
    )
    return normed, total


def rope_store(
    qkv: Tensor,
    rows: RowPass,
    rope_table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    heads: AttentionHeads,
) -> bool:
    lib = library_for(qkv, key_cache, value_cache, heads.q_norm, heads.k_norm)
    head_dim = key_cache.shape[2]
    contiguous = all(x.is_contiguous() for x in (key_cache, value_cache, rope_table))
    if lib is None or head_dim > MAX_HEAD_DIM or not contiguous:
        return False
    if rope_table.dtype != torch.float32:
        return False
    positions = rows.positions.long().contiguous()
    kv_slots = rows.kv_slots.long().contiguous()
    lib.functions["rope_store", qkv.dtype](
        qkv.data_ptr(),
        positions.data_ptr(),
        kv_slots.data_ptr(),
        rope_table.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        pointer(heads.q_norm),
        pointer(heads.k_norm),
        len(qkv),
        heads.num_heads,
        heads.num_kv_heads,
        head_dim,
        rope_table.shape[1],
        len(rope_table),
        qkv.stride(0),
        heads.eps,
        kernel_threads(),
    )
    return True


def swiglu(gate_up: Tensor) -> Tensor | None:
    lib = library_for(gate_up)
    if lib is None:
        return None
    rows = gate_up.shape[0]
    inner = gate_up.shape[1] // 2
    out = torch.empty(rows, inner, dtype=gate_up.dtype)
    lib.functions["swiglu", gate_up.dtype](
        gate_up.data_ptr(), out.data_ptr(), rows, inner, gate_up.stride(0), kernel_threads()
    )
    return out


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: RowPass,
    params: AttentionParams,
    out: Tensor,
) -> bool:
    """Attention without soft caps: query and out [T, heads, d], each row contiguous."""
    lib = library_for(query, key_cache, value_cache, out)
    _, heads, head_dim = query.shape
    kv_heads = key_cache.shape[1]
    if lib is None or not supports_heads(head_dim, heads // kv_heads):
        return False
    contiguous = key_cache.is_contiguous() and value_cache.is_contiguous()
    if params.softcap is not None or not contiguous:
        return False
    if not query.stride(1) == out.stride(1) == head_dim:
        return False
    requests = (rows.page_tables, rows.row_starts, rows.row_counts, rows.first_positions)
    int_tensors = [x.int().contiguous() for x in requests]
    sinks = None if params.sinks is None else params.sinks.float().contiguous()
    tree_masks = positions = None
    if rows.tree_masks is not None:
        tree_masks = rows.tree_masks.long().contiguous()
        positions = rows.positions.long().contiguous()
    lib.functions["attend", query.dtype](
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        *(x.data_ptr() for x in int_tensors),
        pointer(tree_masks),
        pointer(positions),
        pointer(sinks),
        out.data_ptr(),
        rows.bidirectional_rows,
        len(rows.page_tables),
        rows.max_rows,
        heads,
        kv_heads,
        head_dim,
        rows.page_size,
        rows.page_tables.shape[1],
        query.stride(0),
        out.stride(0),
        params.window_size,
        params.scale,
        kernel_threads(),
    )
    return True


def supports_heads(head_dim: int, group: int) -> bool:
    """Whether the attention in C supports heads of this size, in groups of this size."""
    return head_dim <= MAX_HEAD_DIM and head_dim % 2 == 0 and group <= MAX_GROUP_SIZE


def argmax(logits: Tensor) -> Tensor | None:
    """logits [T, V] -> the most likely token of each row [T]."""
    lib = library_for(logits)
    if lib is None:
        return None
    ids = torch.empty(len(logits), dtype=torch.long)
    lib.functions["argmax", logits.dtype](
        logits.data_ptr(), ids.data_ptr(), *logits.shape, logits.stride(0), kernel_threads()
    )
    return ids
