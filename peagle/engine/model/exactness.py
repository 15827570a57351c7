"""Exact mode where no kernels are batch-invariant: every request has its own passes.

A pass over K+1 rows is not bit-equal to K+1 passes over one row: kernels sum in another order, and
where two tokens are almost equally likely the last bit decides. Here, with or without drafts, every
request gets its own passes, padded to a multiple of a few rows, and attention (attention.py) shows
each row a number of keys that depends on its position alone. Then the bits of a row depend neither
on its place in a block nor on its neighbors. The smallest multiple for which that holds, bit by
bit, is found by trying.

The prefill is one pass over the whole prompt, and its bits may differ from those of short passes.
So pages of a prefix that other passes have computed do not replace a part of it. Batches, trees and
shared prefixes need kernels whose sums do not depend on the batch (batch_invariance.py).
"""

from dataclasses import replace

import torch
from torch import Tensor

from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model.verifier import Verifier, target_kv_shapes
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.launch.compile_ahead import compile_ahead
from peagle.target import Target

# Rows of the probed verify passes: K = 7 and K = 15. Exactness is promised for what is probed.
PROBED_BLOCKS = (8, 16)
# Tokens before the probed blocks: blocks within a page, and across the end of one.
PROBED_CONTEXTS = (11, 58, 185, 250)
# Matrix libraries use another kernel for a single row.
ROW_MULTIPLES = (2, 4, 8, 16)


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
    rows of an expert changes their bits there. Nor is there one if the target's context is too
    short for the probe.
    """
    blocks: tuple[int, ...] = PROBED_BLOCKS
    if k + 1 > max(PROBED_BLOCKS):
        blocks = (*PROBED_BLOCKS, k + 1)
    for multiple in ROW_MULTIPLES:
        most = target.context - max(blocks) - multiple
        contexts = sorted({min(context, most) for context in PROBED_CONTEXTS})
        if contexts[0] > 0 and all(
            is_bit_equal(verifier, target, page_size, context, blocks, multiple)
            for context in contexts
        ):
            return multiple
    return None


class Probe:
    """Passes over random tokens of one request, in a KV cache of its own."""

    def __init__(self, verifier: Verifier, target: Target, page_size: int, length: int) -> None:
        device = target.device
        pages = -(-length // page_size)
        self.verifier = verifier
        self.page_size = page_size
        self.kv_cache = KVCache(target_kv_shapes(target), pages, page_size, device)
        self.tables = torch.arange(pages, dtype=torch.int32, device=device)[None]
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(target.vocab_size, (length,), generator=generator).to(device)

    def logits(self, first: int, count: int, multiple: int) -> Tensor:
        """The logits of `count` rows from position `first` on, in one padded pass."""
        device = self.ids.device
        positions = torch.arange(first, first + count, device=device)
        start, counts, firsts = (
            torch.tensor([n], dtype=torch.int32, device=device) for n in (0, count, first)
        )
        rows = RowPass(
            positions, positions, self.tables, start, counts, firsts, count, self.page_size
        )
        padded = pad_rows(self.ids[first : first + count], rows, multiple)
        return self.verifier.forward(*padded, self.kv_cache)[0][:count]


@torch.inference_mode()
def is_bit_equal(
    verifier: Verifier,
    target: Target,
    page_size: int,
    context: int,
    blocks: tuple[int, ...],
    multiple: int,
) -> bool:
    """Whether the logits of a row are the same inside a block and as the first row of a pass."""
    probe = Probe(verifier, target, page_size, context + max(blocks) + multiple)

    def run_passes() -> tuple[list[Tensor], list[Tensor]]:
        probe.logits(0, context, 1)
        in_blocks = [probe.logits(context, size, multiple) for size in blocks]
        return in_blocks, [probe.logits(context + i, 1, multiple)[0] for i in range(max(blocks))]

    compile_ahead(run_passes, target.device)
    in_blocks, singles = run_passes()
    return all(torch.equal(block, torch.stack(singles[: len(block)])) for block in in_blocks)
