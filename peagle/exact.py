"""Exact mode: speculation cannot change a token, not even at a near tie in bfloat16.

A pass over K+1 rows is not bit-equal to K+1 passes over one row: kernels sum in another order, and where two tokens
are almost equally likely the last bit decides. In exact mode, with or without drafts, attention runs in blocks of a
fixed number of rows over a padded number of keys (or, where that does not help, row by row over exactly the keys that
row sees), and passes after the prefill are padded to a multiple of a few rows, the smallest for which matrix kernels
treat every row alike here. Then a row's bits depend neither on its place in a block nor on its neighbours. That this
holds for a target on this machine is probed bit by bit, not assumed.
"""

import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from peagle.errors import UserError
from peagle.target import Target

ROWS, KEYS = 8, 64  # attention in blocks: so many rows, keys padded to a multiple of so many
CONTEXTS = (11, 58)  # probed behind so many tokens: blocks that end before and behind a multiple of KEYS
MULTIPLES = (2, 4, 8, 16)  # never 1: a single row takes a road of its own through most matrix libraries
BLOCKS = (8, 16)  # the verify passes of K = 7 and K = 15: what is probed is what is promised
PREFIX = "peagle_exact_"
BY_ROW = "by_row_"


def set_exact(target: Target, wanted: bool | None, k: int = 0) -> bool:
    """Switches exact mode on or off and tells which. None: on where float32 is not used and the probe passes."""
    on = target.dtype != torch.float32 if wanted is None else wanted
    plain = plain_name(target.model.config._attn_implementation)
    multiple = _multiple(target, plain) if on else 1
    _switch(target, plain, multiple or 1, target.exact_by_row)
    if on and multiple and k >= max(BLOCKS) and not _holds(target, k + 1):
        multiple = None
        _switch(target, plain, 1)
    if multiple is None and wanted:
        raise UserError(
            f"exact mode cannot be had for {target.name!r} with K={k} here: rows depend on their neighbours"
            " (as in mixtures of experts). Use K up to 15, or --no-exact --dtype float32: a near tie is unlikely there"
        )
    return multiple is not None and on


def plain_name(implementation: str) -> str:
    """transformers' name of the attention that exact mode runs."""
    return implementation.removeprefix(PREFIX).removeprefix(BY_ROW)


def native(plain: str, module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    """transformers' attention of that name; "eager" is the one of the module's own file."""
    own: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(plain, own)


def _multiple(target: Target, plain: str) -> int | None:
    """The smallest multiple the probe accepts, found once per target; None: there is none."""
    if target.exact_multiple == 0:
        target.exact_multiple = None
        for by_row, multiple in product((False, True), MULTIPLES):
            _switch(target, plain, multiple, by_row)
            if probe(target):
                target.exact_multiple, target.exact_by_row = multiple, by_row
                break
    return target.exact_multiple


def _holds(target: Target, rows: int) -> bool:
    """Larger blocks than those every target is probed with: probed when they first come up."""
    if rows not in target.exact_rows:
        target.exact_rows[rows] = probe(target, (rows,))
    return target.exact_rows[rows]


def _switch(target: Target, plain: str, multiple: int, by_row: bool = False) -> None:
    name = plain if multiple == 1 else f"{PREFIX}{BY_ROW if by_row else ''}{plain}"
    if name not in ALL_ATTENTION_FUNCTIONS and multiple > 1:
        ALL_ATTENTION_FUNCTIONS.register(name, exact_attention(plain, by_row))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[plain])
    if target.model.config._attn_implementation != name:
        target.model.set_attn_implementation(name)
    target.row_multiple = multiple


Inner = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # query, key, value, mask -> [1, rows, heads, d]


def exact_attention(plain: str, by_row: bool) -> Callable[..., tuple[Tensor, Any]]:
    """transformers' attention `plain`, in one of the two ways that treat every row alike."""
    run = rows_one_by_one if by_row else rows_in_blocks

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        live_rows: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        implementation = native(plain, module)

        def inner(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            return implementation(module, q, k, v, mask, **kwargs)[0]

        rows, keys = query.shape[2], key.shape[2]
        if rows == keys:  # the prefill: one and the same pass for every method
            return inner(query, key, value, attention_mask), None
        return run(inner, query, key, value, attention_mask, live_rows or rows), None

    return attention


def rows_in_blocks(inner: Inner, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, live: int) -> Tensor:
    """ROWS query rows at a time, the last block filled up, over keys filled up to a multiple of KEYS.

    What a kernel adds for a masked key is zero, wherever it lies; only the shapes must not depend on the block.
    """
    rows, keys = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)[None, None]
    unseen = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    mask = pad(mask, (0, -keys % KEYS), value=unseen)
    key, value = (pad(x, (0, 0, 0, -keys % KEYS)) for x in (key, value))
    out = []
    for start in range(0, live, ROWS):
        end = min(start + ROWS, rows)
        fill = ROWS - (end - start)
        q, seen = (torch.cat([x, x[:, :, -1:].expand(-1, -1, fill, -1)], 2) if fill else x
                   for x in (query[:, :, start:end], mask[:, :, start:end]))  # fmt: skip
        out.append(inner(q, key, value, seen)[:, : end - start])
    return _filled(out, rows)


def rows_one_by_one(inner: Inner, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, live: int) -> Tensor:
    """Each row over the keys up to itself."""
    rows, keys, out = query.shape[2], key.shape[2], []
    for i in range(live):
        end = keys - rows + i + 1
        seen = None if mask is None else mask[:, :, i : i + 1, :end]
        if seen is not None and seen.dtype == torch.bool and seen.all():
            seen = None  # the same numbers, without copying keys and values for every head
        out.append(inner(query[:, :, i : i + 1], key[:, :, :end], value[:, :, :end], seen))
    return _filled(out, rows)


def _filled(out: list[Tensor], rows: int) -> Tensor:
    """[1, rows, heads, d]: rows that are padding hold zeros."""
    whole = torch.cat(out, 1)
    return torch.cat([whole, whole.new_zeros(1, rows - whole.shape[1], *whole.shape[2:])], 1)


def probe(target: Target, sizes: tuple[int, ...] = BLOCKS) -> bool:
    """Are a row's logits the same, bit by bit, in the middle of a block and as the first row of its own pass?"""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (max(CONTEXTS) + max(sizes),), generator=generator).to(target.device)
    room = target.context - max(sizes)
    return all(_alike(target, ids, context, sizes) for context in CONTEXTS if context == CONTEXTS[0] or context <= room)


def _alike(target: Target, ids: Tensor, context: int, sizes: tuple[int, ...]) -> bool:
    cache, blocks = target.new_cache(), []
    target.forward(ids[:context], cache, keep=1)
    for rows in sizes:
        blocks.append(target.forward(ids[context : context + rows], cache).logits)
        cache.rollback(context)
    for i in range(min(sizes)):
        single = target.forward(ids[context + i : context + i + 1], cache).logits[0]
        if not all(torch.equal(single, block[i]) for block in blocks):
            return False
    return True
