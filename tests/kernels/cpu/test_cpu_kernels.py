"""The C kernels equal their PyTorch references, and do not depend on the other rows of a batch."""

from functools import partial

import pytest
import torch
from torch import Tensor

from peagle.kernels.attention_params import AttentionParams
from peagle.kernels.cpu import ops
from peagle.kernels.row_pass import RowPass
from tests.support.kernels.comparing import some
from tests.support.kernels.kernel_cases import CASES, check_attention

DTYPES = [torch.bfloat16, torch.float32]
C_CASES = [
    name for name in CASES if name.startswith(("add_norm", "swiglu", "rope_store", "attention"))
]
ATTENTION_CASES = {
    "one row of each": partial(
        check_attention, 9, 3, 64, [1] * 8, [1, 63, 64, 65, 127, 128, 129, 200], page_size=64
    ),
    "pages of 64": partial(check_attention, 9, 3, 64, [8, 9, 3], [64, 65, 130], page_size=64),
    "over the ends of blocks": partial(check_attention, 4, 4, 80, [70, 2], [200, 66], page_size=16),
    "wide heads": partial(check_attention, 4, 1, 256, [5, 8], [5, 77], page_size=16),
    "one group of 32": partial(check_attention, 32, 1, 16, [5, 8], [5, 77], page_size=16),
    "a window over blocks": partial(
        check_attention, 3, 1, 64, [8, 8], [300, 64], window=100, page_size=64
    ),
    "sinks and a window": partial(
        check_attention, 8, 2, 64, [1, 8, 70], [200, 66, 140], sinks=True, window=40
    ),
}


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", C_CASES)
def test_against_the_reference(name: str, dtype: torch.dtype) -> None:
    CASES[name]("cpu", dtype)


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_attention(name: str, dtype: torch.dtype) -> None:
    ATTENTION_CASES[name]("cpu", dtype)


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 33, 4099])
def test_argmax(size: int, dtype: torch.dtype) -> None:
    logits = some(9, size + 3).to(dtype)[:, 1 : size + 1]  # rows with gaps between them
    ids = ops.argmax(logits)
    assert ids is not None and torch.equal(ids, logits.argmax(-1))
    tied = torch.zeros(2, size, dtype=dtype)
    tied[1, size // 2] = float("nan")
    tied[0, size - 1] = -float("inf")
    assert ops.argmax(tied).tolist() == [0, size // 2]  # type: ignore[union-attr]


@pytest.mark.usefixtures("cpu_level")
def test_nan_stays_nan() -> None:
    """NaN must reach the engine, which then fails the request instead of returning noise."""
    x = torch.tensor([[float("nan"), 1.0, float("inf"), -3.0]]).bfloat16()
    normed, _ = ops.add_norm(x, x, torch.ones(4).bfloat16(), 1e-5, None)  # type: ignore[misc]
    assert normed.isnan().any()
    gate = ops.swiglu(torch.tensor([[float("nan"), 200.0, -200.0, 1.0, 1.0, 1.0]]))
    assert gate is not None and gate[0, 0].isnan() and gate[0, 1] == 200 and abs(gate[0, 2]) < 1e-30


@pytest.mark.usefixtures("cpu_level")
def test_a_large_sink_takes_all_weight() -> None:
    table = torch.zeros(1, 1).int()
    one = table[0] + 1
    rows = RowPass(one.long(), one.long(), table, table[0], one, table[0], 1, 16)
    query, keys, values = torch.zeros(1, 2, 16), torch.ones(16, 2, 16), torch.ones(16, 2, 16)
    out = torch.zeros_like(query)
    params = AttentionParams(1.0, sinks=torch.tensor([50.0, -50.0]))
    assert ops.attend(query, keys, values, rows, params, out)
    assert (out[0, 0] < 1e-20).all() and (out[0, 1] == 1).all()


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 4, 6)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_does_not_depend_on_neighbors(dtype: torch.dtype, sinks: Tensor | None) -> None:
    """A row has the same bits alone, in a block, with other requests, and with two threads."""
    heads, kv_heads, d, page_size, length = 6, 2, 64, 16, 150
    keys, values = (some(20 * page_size, kv_heads, d, seed=i).to(dtype) for i in range(2))
    tables = torch.randperm(20, generator=torch.Generator().manual_seed(0)).view(2, 10).int()
    query = some(length, heads, d).to(dtype)

    def run(spans: list[tuple[int, int]]) -> Tensor:
        """Run attention for rows first..end of requests 0, 1, ...; return the rows of request 0."""
        counts = torch.tensor([end - first for first, end in spans]).int()
        block = torch.cat([query[first:end] for first, end in spans])
        out = torch.zeros_like(block)
        starts = (counts.cumsum(0) - counts).int()
        firsts = torch.tensor([first for first, _ in spans]).int()
        unused = torch.zeros(len(block), dtype=torch.long)
        rows = RowPass(
            unused,
            unused,
            tables[: len(spans)],
            starts,
            counts,
            firsts,
            int(counts.max()),
            page_size,
        )
        params = AttentionParams(0.125, 90, sinks=sinks)
        assert ops.attend(block, keys, values, rows, params, out)
        return out[: counts[0]]

    whole = run([(0, length)])
    for row in (0, 15, 16, 63, 64, 65, 149):
        assert torch.equal(run([(row, row + 1)])[0], whole[row])
    assert torch.equal(run([(60, 68)]), whole[60:68])
    assert torch.equal(run([(60, 68), (3, 9)]), whole[60:68])
    torch.set_num_threads(2)
    try:
        assert torch.equal(run([(60, 68), (3, 9)]), whole[60:68])
        assert torch.equal(run([(0, length)]), whole)
    finally:
        torch.set_num_threads(1)
