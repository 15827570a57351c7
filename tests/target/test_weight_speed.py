"""The speed probe multiplies matrices of the target, in a sample larger than the cache."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peagle.target import weight_speed
from peagle.target.expert_shapes import ExpertShapes
from peagle.target.matrix_shapes import DEFAULT_SHAPES, MatrixShapes, read_shapes
from peagle.target.weight_speed import (
    MAX_BYTES,
    MIN_BYTES,
    ROW_COUNTS,
    build_bfloat16,
    build_float32,
    last_level_cache_bytes,
    measure_passes,
)
from tests.support.kernels.cpu_features import needs_c

SMALL = MatrixShapes(64, 128, 64, 32, 2, 256)


def weights(sample: list[tuple[int, int]]) -> int:
    return sum(n * k for n, k in sample)


def test_matrices_of_the_target() -> None:
    assert SMALL.layer == ((128, 64), (64, 64), (256, 64), (64, 128))
    assert SMALL.weights == 2 * (128 + 64 + 256 + 128) * 64 + 256 * 64
    assert SMALL.sample(1e9) == [*(SMALL.layer * 2), (256, 64)]


@pytest.mark.parametrize("size", [30e6, 60e6, 100e6])
@pytest.mark.parametrize(
    "shapes", [DEFAULT_SHAPES, MatrixShapes(4096, 14336, 4096, 1024, 32, 128256)]
)
def test_a_sample_has_the_given_size(shapes: MatrixShapes, size: float) -> None:
    """A layer may have more weights than the sample."""
    assert weights(shapes.sample(size)) == pytest.approx(size, rel=0.15)


def test_every_candidate_is_timed_with_every_number_of_rows() -> None:
    times = measure_passes(SMALL)
    assert times.keys() == {"float32", "bfloat16"}
    for by_rows in times.values():
        assert tuple(by_rows) == ROW_COUNTS
        assert all(0 < ms < 1000 for ms in by_rows.values())


def test_a_format_without_a_kernel_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_speed, "can_pack", lambda weight: False)
    assert "Q4_1" not in measure_passes(SMALL, "Q4_1")
    assert "IQ2_XS" not in measure_passes(SMALL, "IQ2_XS")


def test_times_are_extrapolated_to_the_target() -> None:
    """The times of a probe with a tenth of the weights are multiplied by ten."""
    candidate = weight_speed.candidates(None)[0]
    shapes = MatrixShapes(256, 512, 256, 128, 20, 1024)
    whole = weight_speed.Probe(candidate, shapes, 1e9)
    part = weight_speed.Probe(candidate, shapes, 4 * shapes.weights / 10)
    assert whole.factor == 1
    assert part.factor == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize("native", [True, False])
def test_candidates_compute_a_product(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(weight_speed, "can_pack", lambda weight: False)
    weight = torch.randn(64, 32).bfloat16()
    monkeypatch.setattr(weight_speed, "random_weight", lambda shape: weight.clone())
    for build, dtype in ((build_float32, torch.float32), (build_bfloat16, torch.bfloat16)):
        multiply = build((64, 32))
        assert multiply is not None
        x = torch.randn(4, 32).to(dtype)
        expected = x.float() @ weight.float().T
        torch.testing.assert_close(multiply(x).float(), expected, rtol=0.02, atol=0.05)


def test_samples_exceed_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, size in enumerate(("32K", "1024K", "16384K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert last_level_cache_bytes(tmp_path) == 16 << 20
    assert last_level_cache_bytes(tmp_path / "absent") == weight_speed.DEFAULT_CACHE_BYTES
    for cache, expected in ((1 << 20, MIN_BYTES), (32 << 20, 96 << 20), (1 << 30, MAX_BYTES)):
        monkeypatch.setattr(weight_speed, "last_level_cache_bytes", lambda cache=cache: cache)
        assert weight_speed.sample_bytes() == expected


@pytest.mark.parametrize(
    "config",
    [None, "{", "[]", {}, {"hidden_size": 0, "num_attention_heads": 1}, {"hidden_size": "x"}],
)
def test_an_unknown_config_has_no_shapes(tmp_path: Path, config: object) -> None:
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(text)
    assert read_shapes(tmp_path) is None


def test_a_nested_text_config_is_read(tmp_path: Path) -> None:
    text_config = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "vocab_size": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text_config}))
    assert read_shapes(tmp_path) == MatrixShapes(64, 128, 128, 64, 2, 256)


# Experts.

EXPERTS = ExpertShapes(64, 32, 8, 2, 2)
MIXTURE = MatrixShapes(64, 32, 64, 32, 2, 256, EXPERTS)
ATTENTION = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}
MIXTURE_CONFIGS: dict[str, dict[str, object]] = {
    "qwen3-moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 500,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    "gpt-oss": {"num_local_experts": 8, "experts_per_token": 2, "intermediate_size": 32},
}


@pytest.mark.parametrize("name", MIXTURE_CONFIGS)
def test_the_experts_of_a_config(name: str, tmp_path: Path) -> None:
    config = ATTENTION | MIXTURE_CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shapes(tmp_path) == MIXTURE


def test_mxfp4_experts_of_a_config(tmp_path: Path) -> None:
    stored = {"quantization_config": {"quant_method": "mxfp4"}}
    config = ATTENTION | MIXTURE_CONFIGS["gpt-oss"] | stored
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = read_shapes(tmp_path)
    assert shapes is not None and shapes.experts is not None and shapes.experts.is_mxfp4
    assert shapes.name == "2 x (64, 2 of 8 experts with 32 in MXFP4, 64 + 2 * 32), 256"
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    assert read_shapes(tmp_path) is None


def test_the_experts_that_a_pass_reads() -> None:
    qwen3 = ExpertShapes(2048, 768, 128, 8, 48)
    assert qwen3.weights == 48 * 128 * 3 * 2048 * 768
    assert qwen3.share_read(1) == pytest.approx(8 / 128)
    assert 128 * qwen3.share_read(8) == pytest.approx(51.6, abs=0.1)
    assert [qwen3.matrix_rows(rows) for rows in (1, 8, 64, 512)] == [1, 1, 4, 32]
    for size in (1e6, 3e6, 40e6):  # Less than an expert, one, and many.
        assert weights(qwen3.sample(size)) == pytest.approx(size, rel=0.4)
    assert EXPERTS.sample(1e9) == list(EXPERTS.expert) * 16


def test_experts_are_timed_separately() -> None:
    candidate = weight_speed.candidates(None)[0]
    probe = weight_speed.Probe(candidate, EXPERTS, 1e9)
    assert probe.inputs[8][64].shape == (EXPERTS.matrix_rows(8), 64) == (2, 64)
    probe.best = {(rows, shape): 1e-3 for rows in ROW_COUNTS for shape in EXPERTS.expert}
    assert probe.times == {rows: round(32 * EXPERTS.share_read(rows), 3) for rows in ROW_COUNTS}
    assert MIXTURE.layer == ((128, 64), (64, 64), (8, 64))
    times = measure_passes(MIXTURE)
    assert times.keys() == {"float32", "bfloat16"}


def test_mxfp4_experts_are_timed_in_mxfp4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without C kernels they are not timed, because they are dequantized with every dtype."""
    shapes = replace(MIXTURE, experts=replace(EXPERTS, is_mxfp4=True))
    built: list[tuple[int, int]] = []

    def build(shape: tuple[int, int]) -> weight_speed.Multiply:
        built.append(shape)
        return lambda x: x

    monkeypatch.setattr(weight_speed, "build_mxfp4", build)
    for compiled in (object(), None):
        monkeypatch.setattr(weight_speed, "kernel_build", lambda compiled=compiled: compiled)
        built.clear()
        assert measure_passes(shapes).keys() == {"float32", "bfloat16"}
        assert set(built) == (set(EXPERTS.expert) if compiled else set())


@needs_c
def test_mxfp4_matrices_are_finite() -> None:
    multiply = weight_speed.build_mxfp4((48, 64))
    assert multiply is not None and multiply(torch.ones(2, 64)).isfinite().all()
