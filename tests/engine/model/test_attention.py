"""Paged attention in PyTorch blocks, for machines without the C kernel."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from peagle.engine.model.attention import attend
from peagle.kernels.attention_params import AttentionParams
from peagle.kernels.cpu import ops
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.attention import paged_attention
from tests.support.kernels.comparing import near, some

HEADS = 6
KV_HEADS = 2
HEAD_DIM = 16
PAGE_SIZE = 8
PAGES = 10
PARAMS = {
    "plain": AttentionParams(0.25),
    "window": AttentionParams(0.25, window=9),
    "sinks": AttentionParams(0.25, sinks=torch.linspace(-1, 3, HEADS)),
    "sinks and a window": AttentionParams(0.25, window=9, sinks=torch.linspace(-1, 3, HEADS)),
    "a soft cap": AttentionParams(0.25, softcap=0.5),
}


@pytest.fixture(autouse=True)
def no_c_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "attend", lambda *_: False)


def make_rows(counts: Sequence[int], firsts: Sequence[int]) -> RowPass:
    row_counts = torch.tensor(counts).int()
    first_positions = torch.tensor(firsts).int()
    positions = torch.cat(
        [first + torch.arange(count) for count, first in zip(counts, firsts, strict=True)]
    )
    return RowPass(
        positions,
        positions,
        torch.arange(len(counts) * PAGES).flip(0).view(-1, PAGES).int(),
        (row_counts.cumsum(0) - row_counts).int(),
        row_counts,
        first_positions,
        max(counts),
        PAGE_SIZE,
    )


def check(rows: RowPass, params: AttentionParams, dtype: torch.dtype) -> None:
    slots = rows.page_tables.numel() * PAGE_SIZE
    keys, values = (some(slots, KV_HEADS, HEAD_DIM, seed=i).to(dtype) for i in range(2))
    query = some(len(rows.positions), HEADS, HEAD_DIM).to(dtype)
    result = attend(query, keys, values, rows, params)
    near(result, paged_attention.reference(query, keys, values, rows, params), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize(
    ("counts", "firsts"), [([1, 5, 8], [40, 6, 0]), ([5], [20]), ([33, 2], [0, 50])]
)
def test_chains(
    counts: Sequence[int], firsts: Sequence[int], name: str, dtype: torch.dtype
) -> None:
    """Short blocks of several requests, of one request, and a prefill."""
    check(make_rows(counts, firsts), PARAMS[name], dtype)


@pytest.mark.parametrize("name", PARAMS)
def test_trees(name: str) -> None:
    rows = make_rows([3, 3], [40, 6])
    siblings = torch.tensor([0b001, 0b011, 0b101]).repeat(2)
    positions = rows.positions - torch.tensor([0, 0, 1]).repeat(2)
    check(replace(rows, positions=positions, tree_masks=siblings), PARAMS[name], torch.float32)
