"""The C kernels: against their PyTorch references, and independent of a row's neighbors."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.verifier import build_verifier, target_kv_shapes
from peagle.kernels.attention_params import AttentionParams
from peagle.kernels.cpu import ops
from peagle.kernels.cpu.matrix import INPUT_GROUP, PackedMatrix, quantize_int8
from peagle.kernels.row_pass import RowPass
from tests.support.comparing import near, some
from tests.support.cpu_features import needs_dots
from tests.support.kernel_cases import CASES, check_attention
from tests.support.tiny_models import make_target

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
    logits = some(9, size + 3).to(dtype)[:, 1 : size + 1]  # rows apart
    ids = ops.argmax(logits)
    assert ids is not None and torch.equal(ids, logits.argmax(-1))
    tied = torch.zeros(2, size, dtype=dtype)
    tied[1, size // 2] = float("nan")
    tied[0, size - 1] = -float("inf")
    assert ops.argmax(tied).tolist() == [0, size // 2]  # type: ignore[union-attr]


@pytest.mark.usefixtures("cpu_level")
def test_nan_stays_nan() -> None:
    """The engine must notice it, and fail the request instead of answering with noise."""
    x = torch.tensor([[float("nan"), 1.0, float("inf"), -3.0]]).bfloat16()
    normed, _ = ops.add_norm(x, x, torch.ones(4).bfloat16(), 1e-5, None)  # type: ignore[misc]
    assert normed.isnan().any()
    gate = ops.swiglu(torch.tensor([[float("nan"), 200.0, -200.0, 1.0, 1.0, 1.0]]))
    assert gate is not None and gate[0, 0].isnan() and gate[0, 1] == 200 and abs(gate[0, 2]) < 1e-30


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_does_not_depend_on_neighbors(dtype: torch.dtype) -> None:
    """A row has the same bits alone, in a block, beside other requests, and with two threads."""
    heads, kv_heads, d, page_size, length = 6, 2, 64, 16, 150
    keys, values = (some(20 * page_size, kv_heads, d, seed=i).to(dtype) for i in range(2))
    tables = torch.randperm(20, generator=torch.Generator().manual_seed(0)).view(2, 10).int()
    query = some(length, heads, d).to(dtype)

    def run(spans: list[tuple[int, int]]) -> Tensor:
        """Attend with rows first..end of request 0, 1, ...; return those of request 0."""
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
        assert ops.attend(block, keys, values, rows, AttentionParams(0.125, 90), out)
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


@needs_dots
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 2), (48, 32), (50, 34), (96, 576), (130, 48)])
def test_products(n: int, k: int, bias: bool, int8: bool) -> None:
    weight = (some(n, k) / k**0.5).bfloat16()
    bias_values = some(n).bfloat16() if bias else None
    matrix = PackedMatrix(weight, bias_values)
    x = some(30, k + 2).bfloat16()[:, 2:]  # rows apart
    x_seen = x.float()
    if int8:
        codes, scales = quantize_int8(weight)
        assert codes.abs().amax() == 127
        matrix = PackedMatrix(codes, bias_values, scales)
        weight = codes * scales[:, None]
        groups = [part.float() for part in x.split(INPUT_GROUP, 1)]
        steps = [part.abs().amax(1, keepdim=True) / 127 for part in groups]
        x_seen = torch.cat(
            [(part / step).round() * step for part, step in zip(groups, steps, strict=True)], 1
        )
    expected = linear(x_seen, weight.float(), None if bias_values is None else bias_values.float())
    near(matrix(x), expected.bfloat16(), 4 if int8 else 2)
    for rows in (1, 2, 3, 7, 8, 9, 17):  # the same bits, however many rows there are
        assert torch.equal(matrix(x[3 : 3 + rows]), matrix(x)[3 : 3 + rows])


@needs_dots
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_layer_in_one_call_equals_its_parts(name: str) -> None:
    """Bit for bit, with biases, head norms and padding rows."""
    target = make_target(name)
    target.model.to(torch.bfloat16)
    verifier = build_verifier(target, 300)
    assert isinstance(verifier, FusedLlamaTarget)
    assert all(layer.cpu_layer is not None for layer in verifier.layers)
    results = []
    for fused in (True, False):
        if not fused:
            for layer in verifier.layers:
                object.__setattr__(layer, "cpu_layer", None)
        kv_cache = KVCache(target_kv_shapes(target), 6, 16, torch.device("cpu"))
        ids = torch.arange(30) % 90
        positions = torch.cat([torch.arange(20), torch.arange(8), torch.zeros(2, dtype=torch.long)])
        tables = torch.tensor([[3, 0, 5], [1, 2, 4]]).int()
        owner = torch.tensor([0] * 20 + [1] * 8)
        stored = positions[:28]
        slots = tables[owner, stored // 16].long() * 16 + stored % 16
        slots = torch.cat([slots, torch.tensor([-1, -1])])
        starts, counts, first = (torch.tensor(x).int() for x in ([0, 20], [20, 8], [0, 0]))
        rows = RowPass(positions, slots, tables, starts, counts, first, 20, 16)
        with torch.inference_mode():
            logits, _ = verifier.forward(ids, rows, kv_cache)
            results.append((logits[:28], torch.stack(kv_cache.keys)))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
