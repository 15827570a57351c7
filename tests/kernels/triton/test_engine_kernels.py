"""The engine's kernels equal their references in Triton's interpreter and on CUDA."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

pytest.importorskip("triton")

from peagle.kernels.attention_params import AttentionHeads
from peagle.kernels.triton import add_norm, skinny_gemm
from peagle.kernels.triton.attention import rope_store
from tests.support.kernels.comparing import some
from tests.support.kernels.expert_kernel_cases import FORMATS, check_independent_rows
from tests.support.kernels.kernel_cases import CASES, rope_rows
from tests.support.kernels.triton_interpreter import (
    interpreted,
    not_interpreted,
    run_interpreted_tests,
)

DECODE_ATTENTION = str(Path(__file__).with_name("test_decode_attention.py"))
DECODE_ATTENTION_TESTS = 5
# Each takes a second or more in the interpreter, and other cases cover the same kernels.
SLOW_CASES = {
    "exact attention, more blocks of keys than splits",
    "exact rotated attention, large tree",
    "exact rotated attention, tree in the last split and the first",
    "exact trees, in the last split and the first",
    "exact trees, more blocks of keys than splits",
}


@not_interpreted
def test_in_the_interpreter() -> None:
    """Run this file and the tests of decode attention in one process."""
    done = run_interpreted_tests(__file__, DECODE_ATTENTION)
    passed = f"{len(CASES) - len(SLOW_CASES) + DECODE_ATTENTION_TESTS} passed"
    assert done.returncode == 0 and passed in done.stdout, done.stdout + done.stderr
    assert "skipped" not in done.stdout


@not_interpreted
@pytest.mark.slow
def test_slow_cases_in_the_interpreter() -> None:
    done = run_interpreted_tests(__file__, "-m", "slow")
    passed = f"{len(SLOW_CASES)} passed"
    assert done.returncode == 0 and passed in done.stdout, done.stdout + done.stderr


@interpreted
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_CASES)) for name in CASES],
)
def test_kernel_interpreted(name: str) -> None:
    CASES[name]("cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_kernel_on_cuda(name: str, dtype: torch.dtype) -> None:
    CASES[name]("cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_experts_are_independent(format: object, dtype: torch.dtype) -> None:
    """Exact mode depends on this property."""
    check_independent_rows(format, "cuda", dtype)


@not_interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_references_equal_transformers(dtype: torch.dtype) -> None:
    """The norm and the rotation, with and without a head norm, give the same bits."""
    heads, d, row_count = 3, 16, 11
    config = LlamaConfig(
        hidden_size=heads * d, num_attention_heads=heads, max_position_embeddings=64
    )
    norm, head_norm = (LlamaRMSNorm(size, 1e-5).to(dtype) for size in (heads * d, d))
    norm.weight.data = some(heads * d).to(dtype)
    head_norm.weight.data = some(d).to(dtype)
    x = some(row_count, heads * d).to(dtype)
    residual = some(row_count, heads * d, seed=1).to(dtype)
    normed, total = add_norm.reference(x, residual, norm.weight, 1e-5)
    assert torch.equal(normed, norm(x + residual)) and torch.equal(total, x + residual)

    rope = LlamaRotaryEmbedding(config)
    positions = torch.arange(row_count) * 5
    cos, sin = rope(torch.zeros(1), torch.arange(64)[None])
    table = torch.cat([cos[0, :, : d // 2], sin[0, :, : d // 2]], 1)
    for weight in (None, head_norm.weight):
        qkv = some(row_count, 3 * heads * d).to(dtype)
        caches = torch.zeros(2, 32, heads, d, dtype=dtype)
        q, k, v = (part.unflatten(1, (heads, d)) for part in qkv.clone().chunk(3, 1))
        if weight is not None:
            q, k = head_norm(q), head_norm(k)
        angles = (part.to(dtype) for part in rope(torch.zeros(1), positions[None]))
        q, k = apply_rotary_pos_emb(q[None], k[None], *angles, unsqueeze_dim=2)
        slots = torch.randperm(32, generator=torch.Generator().manual_seed(0))[:row_count]
        rope_store.reference(
            qkv,
            rope_rows(positions, slots),
            table,
            caches[0],
            caches[1],
            AttentionHeads(heads, heads, weight, weight, 1e-5),
        )
        assert torch.equal(qkv[:, : heads * d].unflatten(1, (heads, d)), q[0])
        assert torch.equal(caches[0][slots], k[0]) and torch.equal(caches[1][slots], v)


@not_interpreted
@pytest.mark.parametrize(
    ("shape", "splits"),
    [
        ((960, 576), 1),  # too few inputs
        ((6144, 4096), 2),
        ((5120, 2880), 3),  # 2880 = 45 x 64 has no even number of parts
        ((5120, 2048), 4),
        ((2880, 4096), 8),
        ((64, 100), 1),  # not aligned
    ],
)
def test_inputs_are_split_until_a_gpu_is_busy(shape: tuple[int, int], splits: int) -> None:
    assert skinny_gemm.num_splits(torch.empty(shape, device="meta")) == splits
