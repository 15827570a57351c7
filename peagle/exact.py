"""Exact mode: speculation cannot change a token, not even at a near tie in bfloat16.

A pass over K+1 rows is not bit-equal to K+1 passes over one row: matrix kernels sum in another order, and where two
tokens are almost equally likely the last bit decides. In exact mode every pass after the prefill, with or without
drafts, has the same number of rows (padded), and attention runs row by row over exactly the keys that row sees. Then a
row's result does not depend on its place in the block or on its neighbours, and both ways of decoding compute the same
bits. That this holds for a target on this machine is probed, not assumed.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from peagle.errors import UserError
from peagle.target import Target

GROUP = 8  # matrix kernels work on groups of rows; a full group is treated alike


def rows_for(k: int) -> int:
    """K + 1 rows, rounded up to full groups."""
    return -(-(k + 1) // GROUP) * GROUP


def set_exact(target: Target, rows: int) -> None:
    """Fixes the rows of every pass (0: as many as there are). Refuses where the probe finds a difference."""
    plain = target.model.config._attn_implementation.removeprefix("peagle_exact_")
    name = f"peagle_exact_{plain}" if rows else plain
    if (rows, name) == (target.fixed_rows, target.model.config._attn_implementation):
        return
    if rows and name not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(name, by_row(plain))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[plain])
    target.model.set_attn_implementation(name)
    target.fixed_rows = rows
    if rows and not probe(target, rows):
        set_exact(target, 0)
        raise UserError(
            f"exact mode cannot be had for {target.name!r} here: its rows depend on their neighbours"
            " (as in mixtures of experts). Use --dtype float32 instead, where a near tie is very unlikely"
        )


def by_row(plain: str) -> Callable[..., tuple[Tensor, Any]]:
    """transformers' attention `plain`, one query row at a time, each over the keys up to itself."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        own: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        inner = ALL_ATTENTION_FUNCTIONS.get_interface(plain, own)
        rows, keys = query.shape[2], key.shape[2]
        if rows == keys:  # the prefill: one and the same pass for every method
            return inner(module, query, key, value, attention_mask, **kwargs)
        out = []
        for i in range(rows):
            end = keys - rows + i + 1
            mask = None if attention_mask is None else attention_mask[:, :, i : i + 1, :end]
            out.append(inner(module, query[:, :, i : i + 1], key[:, :, :end], value[:, :, :end], mask, **kwargs)[0])
        return torch.cat(out, 1), None  # [1, rows, heads, head_dim]

    return attention


def probe(target: Target, rows: int) -> bool:
    """Is a row's logits the same, bit by bit, in the middle of a block and as the first row of its own pass?"""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (3 * rows,), generator=generator).to(target.device)
    context = rows + 3
    cache = target.new_cache()
    target.forward(ids[:context], cache, keep=1)
    block = target.forward(ids[context : context + rows], cache).logits
    for i in range(rows):
        cache.rollback(context + i)
        if not torch.equal(target.forward(ids[context + i : context + i + 1], cache).logits[0], block[i]):
            return False
    return True
