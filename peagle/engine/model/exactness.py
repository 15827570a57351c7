"""Exact mode: speculation cannot change a token, not even at a near tie in bfloat16.

A pass over K+1 rows is not bit-equal to K+1 passes over one row: kernels sum in another order, and
where two tokens are almost equally likely the last bit decides. In exact mode, with or without
drafts, every request gets its own passes, padded to a multiple of a few rows, and attention
(attention.py) shows each row a number of keys that depends on its position alone. Then the bits of
a row depend neither on its place in a block nor on its neighbors. The smallest multiple for which
that holds, bit by bit, is found by trying.
"""

from dataclasses import replace

import torch
from torch import Tensor

from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.verifier import Verifier, target_kv_shapes
from peagle.kernels.row_pass import RowPass
from peagle.target import Target

# Rows of the probed verify passes: K = 7 and K = 15. Exactness is promised for what is probed.
PROBED_BLOCKS = (8, 16)
# Tokens before the probed blocks: blocks within a page, and across the end of one.
PROBED_CONTEXTS = (11, 58, 185, 250)
# Most matrix libraries use another kernel for a single row; the C kernels do not.
ROW_MULTIPLES = (2, 4, 8, 16)
C_ROW_MULTIPLES = (1, *ROW_MULTIPLES)


def pad_rows(ids: Tensor, rows: RowPass, multiple: int) -> tuple[Tensor, RowPass]:
    """Append rows that belong to no request, up to a multiple of rows."""
    count = -len(ids) % multiple
    if not count:
        return ids, rows
    assert rows.tree_masks is None, "exact mode verifies chains"
    padded_ids, positions = (torch.cat([x, x.new_zeros(count)]) for x in (ids, rows.positions))
    kv_slots = torch.cat([rows.kv_slots, rows.kv_slots.new_full((count,), -1)])
    return padded_ids, replace(rows, positions=positions, kv_slots=kv_slots, _cache={})


def exact_multiple(verifier: Verifier, target: Target, page_size: int, k: int = 0) -> int | None:
    """The multiple of rows that makes passes exact.

    None: no multiple does, as in mixtures of experts that run through transformers: the number of
    rows of an expert changes their bits there. The C kernels of a CPU compute every row by itself.
    """
    blocks: tuple[int, ...] = PROBED_BLOCKS
    if k + 1 > max(PROBED_BLOCKS):
        blocks = (*PROBED_BLOCKS, k + 1)
    uses_c = isinstance(verifier, FusedLlamaTarget) and verifier.cpu_layers is not None
    for multiple in C_ROW_MULTIPLES if uses_c else ROW_MULTIPLES:
        if all(
            is_bit_equal(verifier, target, page_size, context, blocks, multiple)
            for context in PROBED_CONTEXTS
        ):
            return multiple
    return None


@torch.inference_mode()
def is_bit_equal(
    verifier: Verifier,
    target: Target,
    page_size: int,
    context: int,
    blocks: tuple[int, ...],
    multiple: int,
) -> bool:
    """Whether the logits of a row are the same inside a block and as the first row of a pass.

    True if the target's context is too short for the probe.
    """
    length = context + max(blocks) + multiple
    if length > target.context:
        return True
    device = target.device
    pages = -(-length // page_size)
    kv_cache = KVCache(target_kv_shapes(target), pages, page_size, device)
    tables = torch.arange(pages, dtype=torch.int32, device=device)[None]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (length,), generator=generator).to(device)

    def logits(first: int, count: int, multiple: int) -> Tensor:
        """The logits of `count` rows from position `first` on, in one padded pass."""
        positions = torch.arange(first, first + count, device=device)
        start, counts, firsts = (
            torch.tensor([n], dtype=torch.int32, device=device) for n in (0, count, first)
        )
        rows = RowPass(positions, positions, tables, start, counts, firsts, count, page_size)
        padded = pad_rows(ids[first : first + count], rows, multiple)
        return verifier.forward(*padded, kv_cache)[0][:count]

    logits(0, context, 1)
    in_blocks = [logits(context, size, multiple) for size in blocks]
    singles = [logits(context + i, 1, multiple)[0] for i in range(min(blocks))]
    return all(
        torch.equal(single, block[i]) for i, single in enumerate(singles) for block in in_blocks
    )
