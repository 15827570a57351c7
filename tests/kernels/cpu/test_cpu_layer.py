"""Layers in one C call give the same bits as separate kernel calls, for any number of rows."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.verifier import build_verifier, target_kv_shapes
from peagle.kernels.row_pass import RowPass
from peagle.kernels.stored_matrix import BLOCK_FORMATS
from peagle.target import Target, load_target
from tests.support.kernels.cpu_levels import levels_and
from tests.support.models.gguf_files import TinyGGUF
from tests.support.models.tiny_models import make_target

DTYPES = [torch.bfloat16, torch.float32]
STORED = [*BLOCK_FORMATS, "mixed"]
MIXED = {"attn_v": "Q6_K", "ffn_up": "Q8_0", "ffn_down": "Q6_K", "attn_k": "BF16"}
PAGE_SIZE = 16
TABLES = torch.tensor([[3, 0, 5], [1, 2, 4]]).int()
PROMPT = torch.arange(30) % 90


class PassResult(NamedTuple):
    logits: Tensor
    taps: Tensor
    keys: Tensor
    values: Tensor


@pytest.fixture(autouse=True)
def own_home(cpu_level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set PEAGLE_HOME after the library was loaded from the usual folder."""
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))


def fused(target: Target) -> FusedLlamaTarget:
    verifier = build_verifier(target, 300)
    assert isinstance(verifier, FusedLlamaTarget)
    return verifier


def run(verifier: FusedLlamaTarget, target: Target, counts: tuple[int, int]) -> PassResult:
    """Run a pass of two requests, with two padding rows that have no slot."""
    kv_cache = KVCache(target_kv_shapes(target), 6, PAGE_SIZE, torch.device("cpu"))
    owner = torch.tensor([0, 1]).repeat_interleave(torch.tensor(counts))
    positions = torch.cat([torch.arange(count) for count in counts])
    slots = TABLES[owner, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    ids = PROMPT[positions + 7 * owner]
    rows = RowPass(
        torch.cat([positions, torch.zeros(2, dtype=torch.long)]),
        torch.cat([slots, torch.tensor([-1, -1])]),
        TABLES,
        torch.tensor([0, counts[0]]).int(),
        torch.tensor(counts).int(),
        torch.zeros(2).int(),
        max(counts),
        PAGE_SIZE,
    )
    with torch.inference_mode():
        logits, taps = verifier.forward(torch.cat([ids, ids[:2]]), rows, kv_cache)
    stored = (torch.stack(kv_cache.keys), torch.stack(kv_cache.values))
    return PassResult(logits[: len(ids)], taps[: len(ids)], *stored)


def use_calls(verifier: FusedLlamaTarget, calls: str) -> None:
    """Run all layers in one C call, each layer in one call, or each kernel in one call."""
    assert verifier.cpu_layers is not None
    if calls != "one":
        verifier.cpu_layers = None
    for layer in verifier.layers:
        assert layer.cpu_layer is not None
        if calls == "kernels":
            object.__setattr__(layer, "cpu_layer", None)


def check_layers(target: Target, int8: bool) -> None:
    results: dict[tuple[int, int], list[PassResult]] = {(1, 1): [], (20, 8): []}
    for calls in ("one", "layers", "kernels"):
        verifier = fused(target)
        verifier.taps = (0, 2, 3)
        if int8:
            verifier.quantize()
        use_calls(verifier, calls)
        for counts, passes in results.items():  # few rows and many
            passes.append(run(verifier, target, counts))
            few = run(verifier, target, (1, 3))
            assert torch.equal(few.logits[0], passes[-1].logits[0])
    for first, *others in results.values():
        assert first.logits.isfinite().all() and first.logits.std() > 0 and first.taps.any()
        for other in others:
            for a, b in zip(first, other, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_all_layers_in_one_call(name: str, dtype: torch.dtype, int8: bool) -> None:
    """Covers biases, head norms and padding rows; float32 weights are exact in bf16."""
    target = make_target(name)
    target.model.to(torch.bfloat16).to(dtype)
    check_layers(target, int8)


# On the native level each format runs in both dtypes with and without int8, elsewhere in one case.
STORED_CASES = [
    (format, dtype, int8) for format in STORED for dtype in DTYPES for int8 in (False, True)
]
STORED_EVERYWHERE = [
    (format, DTYPES[i // 2 % 2], (i + i // 2) % 2 == 0) for i, format in enumerate(STORED)
]
STORED_SLOW = [
    (format, dtype, (i + j) % 2 == 1)
    for i, format in enumerate(STORED)
    for j, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(
    ("cpu_level", "case"),
    levels_and(STORED_CASES, STORED_EVERYWHERE, STORED_SLOW),
    indirect=["cpu_level"],
)
def test_stored_weights(tmp_path: Path, case: tuple[str, torch.dtype, bool]) -> None:
    format, dtype, int8 = case
    formats = MIXED if format == "mixed" else {}
    base = "Q4_K" if format == "mixed" else format
    file = TinyGGUF(tmp_path / "m.gguf", "llama", base, formats, tied=False).write()
    check_layers(load_target(file, dtype, "cpu", stored=True), int8)


def test_float32_weights_that_are_not_exact_in_bf16_have_no_packed_copy() -> None:
    verifier = fused(make_target())
    assert verifier.cpu_layers is None
    assert all(layer.cpu_layer is None for layer in verifier.layers)
    assert verifier.lm_head.matrix is None and verifier.lm_head.weight is not None


def test_layers_of_different_widths() -> None:
    """The scratch memory is sized for the widest layer."""
    target = make_target("llama")
    wide: Any = target.layers[1]
    hidden = target.hidden_size
    for name in ("gate_proj", "up_proj"):
        setattr(wide.mlp, name, torch.nn.Linear(hidden, 2048, bias=False))
    wide.mlp.down_proj = torch.nn.Linear(2048, hidden, bias=False)
    target.model.to(torch.bfloat16)
    verifier = build_verifier(target, 64)
    assert isinstance(verifier, FusedLlamaTarget) and verifier.cpu_layers is not None
    widths = [layer.scratch_width for layer in verifier.cpu_layers.layers]
    assert verifier.cpu_layers.scratch_width > max(widths) > min(widths)
