"""The C kernels, called with tensors. Each returns None (or False) where it is not for them: then PyTorch's turn comes.

They are called from the entry points of the Triton kernels of the same names, where shapes and rules are told.
"""

import torch
from torch import Tensor

from peagle.kernels.cpu.library import DTYPES, Library, library

MAX_DIM, QUERIES = 256, 64  # of a head; heads of a group: as in kernels.c
EVERYTHING = 1 << 30  # a window that sees everything


def usable(*tensors: Tensor | None) -> Library | None:
    """The library, if these are for it: on the CPU, all of one dtype it knows, the numbers of a row side by side."""
    first = tensors[0]
    assert first is not None
    if first.device.type != "cpu" or first.dtype not in DTYPES:
        return None
    if any(x is not None and (x.dtype != first.dtype or x.stride(-1) != 1) for x in tensors):
        return None
    return library()


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    lib = usable(x, residual, weight, out)
    if lib is None:
        return None
    rows, d = x.shape
    normed = torch.empty(rows, d, dtype=x.dtype) if out is None else out
    total = x if residual is None else torch.empty(rows, d, dtype=x.dtype)
    lib.functions["add_norm", x.dtype](
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
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
        torch.get_num_threads(),
    )
    return normed, total


def rope_store(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    heads: int,
    kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> bool:
    lib, d = usable(qkv, key_cache, value_cache, q_norm, k_norm), key_cache.shape[2]
    whole = key_cache.is_contiguous() and value_cache.is_contiguous() and table.is_contiguous()
    if lib is None or d > MAX_DIM or not whole or table.dtype != torch.float32:
        return False
    positions, slots = positions.long().contiguous(), slots.long().contiguous()
    norms = (None if norm is None else norm.data_ptr() for norm in (q_norm, k_norm))
    lib.functions["rope_store", qkv.dtype](
        qkv.data_ptr(),
        positions.data_ptr(),
        slots.data_ptr(),
        table.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        *norms,
        len(qkv),
        heads,
        kv_heads,
        d,
        table.shape[1],
        len(table),
        qkv.stride(0),
        eps,
        torch.get_num_threads(),
    )
    return True


def swiglu(gate_up: Tensor) -> Tensor | None:
    lib = usable(gate_up)
    if lib is None:
        return None
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, inner, dtype=gate_up.dtype)
    lib.functions["swiglu", gate_up.dtype](
        gate_up.data_ptr(), out.data_ptr(), rows, inner, gate_up.stride(0), torch.get_num_threads()
    )
    return out


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tables: Tensor,
    page: int,
    starts: Tensor,
    counts: Tensor,
    first: Tensor,
    most: int,
    scale: float,
    window: int | None,
    out: Tensor,
    masks: Tensor | None = None,
    positions: Tensor | None = None,
    both: int = 0,
) -> bool:
    """query, out [T, heads, d]: a row's heads side by side."""
    lib, (_, heads, d), kv_heads = (
        usable(query, key_cache, value_cache, out),
        query.shape,
        key_cache.shape[1],
    )
    if lib is None or d > MAX_DIM or d % 2 or heads // kv_heads > QUERIES:
        return False
    if not (
        key_cache.is_contiguous()
        and value_cache.is_contiguous()
        and query.stride(1) == out.stride(1) == d
    ):
        return False
    numbers = [x.int().contiguous() for x in (tables, starts, counts, first)]
    tree = [
        None if x is None or masks is None else x.long().contiguous() for x in (masks, positions)
    ]
    lib.functions["attend", query.dtype](
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        *(x.data_ptr() for x in numbers),
        *(None if x is None else x.data_ptr() for x in tree),
        out.data_ptr(),
        both,
        len(tables),
        most,
        heads,
        kv_heads,
        d,
        page,
        tables.shape[1],
        query.stride(0),
        out.stride(0),
        EVERYTHING if window is None else window,
        scale,
        torch.get_num_threads(),
    )
    return True


def argmax(logits: Tensor) -> Tensor | None:
    """logits [T, V] -> the likeliest of each row [T]."""
    lib = usable(logits)
    if lib is None:
        return None
    ids = torch.empty(len(logits), dtype=torch.long)
    lib.functions["argmax", logits.dtype](
        logits.data_ptr(), ids.data_ptr(), *logits.shape, logits.stride(0), torch.get_num_threads()
    )
    return ids
