"""The C kernels: against their PyTorch references, and every row the same bits whatever its neighbors are."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.row_pass import RowPass
from peagle.engine.model.verifier import build_verifier, target_kv_shapes
from peagle.kernels.cpu import ops
from peagle.kernels.cpu.library import library
from peagle.kernels.cpu.matrix import GROUP, Matrix, quantized_matrix
from tests.kernels.test_engine_kernels import CASES, attends, near, some
from tests.support.cpu_features import needs_dots
from tests.support.tiny_models import make_target

DTYPES = [torch.bfloat16, torch.float32]
IN_C = [
    name for name in CASES if name.startswith(("add_norm", "swiglu", "rope_store", "attention"))
]
MORE = {
    "one row of each": partial(
        attends, 9, 3, 64, [1] * 8, [1, 63, 64, 65, 127, 128, 129, 200], page=64
    ),
    "pages of 64": partial(attends, 9, 3, 64, [8, 9, 3], [64, 65, 130], page=64),
    "over the ends of blocks": partial(attends, 4, 4, 80, [70, 2], [200, 66], page=16),
    "wide heads": partial(attends, 4, 1, 256, [5, 8], [5, 77], page=16),
    "one group of 32": partial(attends, 32, 1, 16, [5, 8], [5, 77], page=16),
    "a window over blocks": partial(attends, 3, 1, 64, [8, 8], [300, 64], window=100, page=64),
}
needs_c = pytest.mark.skipif(library() is None, reason="no C compiler")


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IN_C)
def test_against_the_reference(name: str, dtype: torch.dtype) -> None:
    CASES[name]("cpu", dtype)


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MORE)
def test_attention(name: str, dtype: torch.dtype) -> None:
    MORE[name]("cpu", dtype)


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 16, 33, 4099])
def test_argmax(size: int, dtype: torch.dtype) -> None:
    logits = some(9, size + 3).to(dtype)[:, 1 : size + 1]  # rows apart
    found = ops.argmax(logits)
    assert found is not None and torch.equal(found, logits.argmax(-1))
    tied = torch.zeros(2, size, dtype=dtype)
    tied[1, size // 2] = float("nan")
    tied[0, size - 1] = -float("inf")
    assert ops.argmax(tied).tolist() == [0, size // 2]  # type: ignore[union-attr]


@needs_c
def test_what_is_not_a_number_stays_so() -> None:
    """The engine must see it: a request is given up then, not answered with noise."""
    x = torch.tensor([[float("nan"), 1.0, float("inf"), -3.0]]).bfloat16()
    normed, _ = ops.add_norm(x, x, torch.ones(4).bfloat16(), 1e-5, None)  # type: ignore[misc]
    assert normed.isnan().any()
    gate = ops.swiglu(torch.tensor([[float("nan"), 200.0, -200.0, 1.0, 1.0, 1.0]]))
    assert gate is not None and gate[0, 0].isnan() and gate[0, 1] == 200 and abs(gate[0, 2]) < 1e-30


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_does_not_depend_on_neighbors(dtype: torch.dtype) -> None:
    """A row alone, in the middle of a block, beside other requests, on one thread or two: the same bits."""
    heads, kv_heads, d, page, length = 6, 2, 64, 16, 150
    keys, values = (some(20 * page, kv_heads, d, seed=i).to(dtype) for i in range(2))
    tables = torch.randperm(20, generator=torch.Generator().manual_seed(0)).view(2, 10).int()
    query = some(length, heads, d).to(dtype)

    def run(spans: list[tuple[int, int]]) -> Tensor:
        """The rows first..end of request 0, 1, ...; those of request 0."""
        counts = torch.tensor([end - first for first, end in spans]).int()
        rows = torch.cat([query[first:end] for first, end in spans])
        out, first = torch.zeros_like(rows), torch.tensor([first for first, _ in spans]).int()
        starts = (counts.cumsum(0) - counts).int()
        most = int(counts.max())
        table = tables[: len(spans)]
        assert ops.attend(
            rows, keys, values, table, page, starts, counts, first, most, 0.125, 90, out
        )
        return out[: counts[0]]

    whole = run([(0, length)])
    for at in (0, 15, 16, 63, 64, 65, 149):
        assert torch.equal(run([(at, at + 1)])[0], whole[at])
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
    weight, plus = (some(n, k) / k**0.5).bfloat16(), some(n).bfloat16() if bias else None
    matrix = Matrix(weight, plus)
    if int8:
        codes, scales = quantized_matrix(weight)
        matrix = Matrix(codes, plus, scales)
    x = some(30, k + 2).bfloat16()[:, 2:]  # rows apart
    if int8:
        whole, scales = quantized_matrix(weight)
        assert whole.abs().amax() == 127
        weight = whole * scales[:, None]
        groups = [part.float() for part in x.split(GROUP, 1)]
        steps = [part.abs().amax(1, keepdim=True) / 127 for part in groups]
        x_seen = torch.cat(
            [(part / step).round() * step for part, step in zip(groups, steps, strict=True)], 1
        )
    else:
        x_seen = x.float()
    wanted = linear(x_seen, weight.float(), None if plus is None else plus.float())
    near(matrix(x), wanted.bfloat16(), 4 if int8 else 2)
    for rows in (1, 2, 3, 7, 8, 9, 17):  # the same bits, however many rows there are
        assert torch.equal(matrix(x[3 : 3 + rows]), matrix(x)[3 : 3 + rows])


@needs_dots
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_layer_in_one_call_is_its_parts(name: str) -> None:
    """Bit for bit: biases, head norms, rows of nobody."""
    target = make_target(name)
    target.model.to(torch.bfloat16)
    lean = build_verifier(target, 300)
    assert isinstance(lean, FusedLlamaTarget) and all(
        layer.cpu_layer is not None for layer in lean.layers
    )
    results = []
    for whole in (True, False):
        if not whole:
            for layer in lean.layers:
                object.__setattr__(layer, "cpu_layer", None)
        memory = KVCache(target_kv_shapes(target), 6, 16, torch.device("cpu"))
        ids = torch.arange(30) % 90
        at = torch.cat([torch.arange(20), torch.arange(8), torch.zeros(2, dtype=torch.long)])
        tables = torch.tensor([[3, 0, 5], [1, 2, 4]]).int()
        owner = torch.tensor([0] * 20 + [1] * 8)
        slots = torch.cat(
            [tables[owner, at[:28] // 16].long() * 16 + at[:28] % 16, torch.tensor([-1, -1])]
        )
        starts, counts, first = (torch.tensor(x).int() for x in ([0, 20], [20, 8], [0, 0]))
        rows = RowPass(at, slots, tables, starts, counts, first, 20, 16)
        with torch.inference_mode():
            results.append((lean.forward(ids, rows, memory)[0][:28], torch.stack(memory.keys)))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
