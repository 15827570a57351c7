"""Exact mode: speculation cannot change a token, not even at a near tie in bfloat16.

A pass over K+1 rows is not bit-equal to K+1 passes over one row: kernels sum in another order, and where two tokens
are almost equally likely the last bit decides. In exact mode, with or without drafts, attention runs row by row over
exactly the keys that row sees, and passes after the prefill are padded to a multiple of a few rows, the smallest for
which matrix kernels treat every row alike here. Then a row's bits depend neither on its place in a block nor on its
neighbours. That this holds for a target on this machine is probed bit by bit, not assumed.
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

MULTIPLES = (2, 4, 8, 16)  # never 1: a single row takes a road of its own through most matrix libraries
BLOCKS = (8, 16)  # the verify passes of K = 7 and K = 15: what is probed is what is promised
PREFIX = "peagle_exact_"


def set_exact(target: Target, wanted: bool | None, k: int = 0) -> bool:
    """Switches exact mode on or off and tells which. None: on where float32 is not used and the probe passes."""
    on = target.dtype != torch.float32 if wanted is None else wanted
    plain = target.model.config._attn_implementation.removeprefix(PREFIX)
    multiple = _multiple(target, plain) if on else 1
    _switch(target, plain, multiple or 1)
    if on and multiple and k >= max(BLOCKS) and not _holds(target, k + 1):
        multiple = None
        _switch(target, plain, 1)
    if multiple is None and wanted:
        raise UserError(
            f"exact mode cannot be had for {target.name!r} with K={k} here: rows depend on their neighbours"
            " (as in mixtures of experts). Use K up to 15, or --no-exact --dtype float32: a near tie is unlikely there"
        )
    return multiple is not None and on


def _multiple(target: Target, plain: str) -> int | None:
    """The smallest multiple the probe accepts, found once per target; None: there is none."""
    if target.exact_multiple == 0:
        target.exact_multiple = None
        for multiple in MULTIPLES:
            _switch(target, plain, multiple)
            if probe(target):
                target.exact_multiple = multiple
                break
    return target.exact_multiple


def _holds(target: Target, rows: int) -> bool:
    """Larger blocks than those every target is probed with: probed when they first come up."""
    if rows not in target.exact_rows:
        target.exact_rows[rows] = probe(target, (rows,))
    return target.exact_rows[rows]


def _switch(target: Target, plain: str, multiple: int) -> None:
    name = plain if multiple == 1 else f"{PREFIX}{plain}"
    if name not in ALL_ATTENTION_FUNCTIONS and multiple > 1:
        ALL_ATTENTION_FUNCTIONS.register(name, by_row(plain))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[plain])
    if target.model.config._attn_implementation != name:
        target.model.set_attn_implementation(name)
    target.row_multiple = multiple


def by_row(plain: str) -> Callable[..., tuple[Tensor, Any]]:
    """transformers' attention `plain`, one query row at a time, each over the keys up to itself."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        live_rows: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        own: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        inner = ALL_ATTENTION_FUNCTIONS.get_interface(plain, own)
        rows, keys = query.shape[2], key.shape[2]
        if rows == keys:  # the prefill: one and the same pass for every method
            return inner(module, query, key, value, attention_mask, **kwargs)
        out = []
        for i in range(live_rows or rows):
            end = keys - rows + i + 1
            mask = None if attention_mask is None else attention_mask[:, :, i : i + 1, :end]
            if mask is not None and mask.dtype == torch.bool and mask.all():
                mask = None  # the same numbers, without copying keys and values for every head
            out.append(inner(module, query[:, :, i : i + 1], key[:, :, :end], value[:, :, :end], mask, **kwargs)[0])
        padding = out[0].new_zeros(1, rows - len(out), *out[0].shape[2:])
        return torch.cat([*out, padding], 1), None  # [1, rows, heads, head_dim]

    return attention


def probe(target: Target, sizes: tuple[int, ...] = BLOCKS) -> bool:
    """Are a row's logits the same, bit by bit, in the middle of a block and as the first row of its own pass?"""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (11 + max(sizes),), generator=generator).to(target.device)
    context, cache = 11, target.new_cache()
    target.forward(ids[:context], cache, keep=1)
    blocks = []
    for rows in sizes:
        blocks.append(target.forward(ids[context : context + rows], cache).logits)
        cache.rollback(context)
    for i in range(min(sizes)):
        single = target.forward(ids[context + i : context + i + 1], cache).logits[0]
        if not all(torch.equal(single, block[i]) for block in blocks):
            return False
    return True
