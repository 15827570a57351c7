"""Paged attention in a decode step: one row per slot, slots of any length.

Expected values come from scaled_dot_product_attention over the keys of each slot. The tests
for the interpreter are run by tests/kernels/triton/test_engine_kernels.py.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from peagle.kernels.attention_params import AttentionParams
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.attention.paged_attention import paged_attention
from tests.support.kernels.triton_interpreter import interpreted

LENGTHS = [0, 15, 63, 64, 65, 127]  # positions of each slot before its newest token
PAGE_SIZE = 16
PAGES_PER_SLOT = 8


class DecodeInputs(NamedTuple):
    query: Tensor  # [slots, heads, d]
    keys: Tensor  # [kv slots, kv_heads, d]
    values: Tensor
    rows: RowPass


def decode_inputs(
    heads: int, kv_heads: int, d: int, dtype: torch.dtype, device: str
) -> DecodeInputs:
    """Slot s has pages s * 8 .. s * 8 + 7; the cache after its end contains large numbers."""
    generator = torch.Generator().manual_seed(0)
    slots = len(LENGTHS)
    query = torch.randn(slots, heads, d, generator=generator)
    caches = torch.randn(2, slots, PAGES_PER_SLOT * PAGE_SIZE, kv_heads, d, generator=generator)
    for slot, length in enumerate(LENGTHS):
        caches[:, slot, length + 1 :] = 1e4
    query, keys, values = (
        x.to(device, dtype) for x in (query, caches[0].flatten(0, 1), caches[1].flatten(0, 1))
    )
    lengths = torch.tensor(LENGTHS, device=device)
    index = torch.arange(slots, dtype=torch.int32, device=device)
    pages = torch.arange(slots * PAGES_PER_SLOT, dtype=torch.int32, device=device)
    rows = RowPass(
        positions=lengths,
        kv_slots=index.long() * PAGES_PER_SLOT * PAGE_SIZE + lengths,
        page_tables=pages.view(slots, PAGES_PER_SLOT),
        row_starts=index,
        row_counts=torch.ones_like(index),
        first_positions=lengths.int(),
        max_rows=1,
        page_size=PAGE_SIZE,
    )
    return DecodeInputs(query, keys, values, rows)


def expected_output(inputs: DecodeInputs, scale: float) -> Tensor:
    outputs = []
    for slot, length in enumerate(LENGTHS):
        start = slot * PAGES_PER_SLOT * PAGE_SIZE
        keys, values = (
            cache[start : start + length + 1].transpose(0, 1)[None].float()
            for cache in (inputs.keys, inputs.values)
        )
        query = inputs.query[slot][None, :, None].float()
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, scale=scale, enable_gqa=True
            )[0, :, 0]
        )
    return torch.stack(outputs)


@interpreted
@pytest.mark.parametrize("heads,kv_heads,d", [(9, 3, 64), (4, 4, 16), (8, 2, 24), (40, 2, 32)])
def test_decode_attention_interpreted(heads: int, kv_heads: int, d: int) -> None:
    inputs = decode_inputs(heads, kv_heads, d, torch.float32, "cpu")
    result = paged_attention(*inputs, AttentionParams(d**-0.5))
    torch.testing.assert_close(result, expected_output(inputs, d**-0.5), rtol=1e-4, atol=1e-5)


@interpreted
def test_decode_attention_of_strided_tensors_interpreted() -> None:
    inputs = decode_inputs(4, 2, 16, torch.float32, "cpu")
    wide = torch.zeros(len(LENGTHS), 6, 16)
    wide[:, 1:5] = inputs.query
    result = paged_attention(wide[:, 1:5], *inputs[1:], AttentionParams(0.3))
    torch.testing.assert_close(result, expected_output(inputs, 0.3), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype,atol", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)]
)
@pytest.mark.parametrize("heads,kv_heads,d", [(9, 3, 64), (32, 8, 128), (14, 2, 80)])
def test_decode_attention_on_cuda(
    heads: int, kv_heads: int, d: int, dtype: torch.dtype, atol: float
) -> None:
    inputs = decode_inputs(heads, kv_heads, d, dtype, "cuda")
    result = paged_attention(*inputs, AttentionParams(d**-0.5))
    expected = expected_output(inputs, d**-0.5)
    torch.testing.assert_close(result.float(), expected, rtol=1e-2, atol=atol)
