"""The decode attention of regeneration: in Triton's interpreter, and on CUDA if present."""

import pytest
import torch

pytest.importorskip("triton")

from peagle.kernels.triton.decode_attention import decode_attention, reference
from tests.support.triton_interpreter import (
    interpreted,
    not_interpreted,
    run_interpreted_tests,
)

LENGTHS = [0, 1, 15, 63, 64, 65, 99, 127]


def inputs(
    heads: int, kv_heads: int, d: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    slots, capacity = len(LENGTHS), 128
    query = torch.randn(slots, heads, 1, d, generator=generator)
    key = torch.randn(slots, kv_heads, capacity, d, generator=generator)
    value = torch.randn(slots, kv_heads, capacity, d, generator=generator)
    lengths = torch.tensor(LENGTHS)
    for slot, length in enumerate(LENGTHS):  # what lies behind the end must not matter
        key[slot, :, length + 1 :] = 1e4
        value[slot, :, length + 1 :] = 1e4
    return (*(x.to(device, dtype) for x in (query[:, :, 0], key, value)), lengths.to(device))


@not_interpreted
def test_in_the_interpreter() -> None:
    done = run_interpreted_tests(__file__)
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout + done.stderr


@interpreted
@pytest.mark.parametrize("heads,kv_heads,d", [(9, 3, 64), (4, 4, 16), (8, 2, 24), (40, 2, 32)])
def test_decode_attention_interpreted(heads: int, kv_heads: int, d: int) -> None:
    given = inputs(heads, kv_heads, d, torch.float32, "cpu")
    torch.testing.assert_close(
        decode_attention(*given, d**-0.5), reference(*given, d**-0.5), rtol=1e-4, atol=1e-5
    )


@interpreted
def test_decode_attention_of_strided_tensors_interpreted() -> None:
    query, key, value, lengths = inputs(4, 2, 16, torch.float32, "cpu")
    wide = torch.zeros(*query.shape[:2], 3, 16)
    wide[:, :, 1] = query
    # [slots, capacity, kv_heads, d] in memory
    swapped = key.transpose(1, 2).contiguous().transpose(1, 2)
    result = decode_attention(wide[:, :, 1], swapped, value, lengths, 0.3)
    torch.testing.assert_close(
        result, reference(query, key, value, lengths, 0.3), rtol=1e-4, atol=1e-5
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype,atol", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)]
)
@pytest.mark.parametrize("heads,kv_heads,d", [(9, 3, 64), (32, 8, 128), (14, 2, 80)])
def test_decode_attention_on_cuda(
    heads: int, kv_heads: int, d: int, dtype: torch.dtype, atol: float
) -> None:
    given = inputs(heads, kv_heads, d, dtype, "cuda")
    result = decode_attention(*given, d**-0.5)
    expected = reference(*given, d**-0.5)
    torch.testing.assert_close(result.float(), expected.float(), rtol=1e-2, atol=atol)
