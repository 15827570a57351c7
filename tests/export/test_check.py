"""`peagle check` finds faults in checkpoints of drafters."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from peagle.export.check import check, used_token
from peagle.export.export import export
from peagle.target import Target
from tests.support.models.checkpoints import VERIFIER, aws_layout
from tests.support.models.tiny_models import make_drafter, make_target


def levels(findings: list) -> dict[str, list[str]]:
    by_level: dict[str, list[str]] = {"ok": [], "warning": [], "error": []}
    for finding in findings:
        by_level[finding.level].append(finding.text)
    return by_level


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


@pytest.fixture
def folder(target: Target, tmp_path: Path) -> Path:
    export(make_drafter(target, "p-eagle", 3, draft_vocab=40), tmp_path / "d", "vllm", 5, VERIFIER)
    return tmp_path / "d"


def test_a_valid_drafter_passes_with_identical_drafts(folder: Path, target: Target) -> None:
    by_level = levels(check(folder, target))
    assert by_level["error"] == []
    assert by_level["warning"] == ["the drafter is untrained: its drafts are noise"]
    assert sum("56 of 56 drafts identical" in text for text in by_level["ok"]) == 2


TENSOR_FAULTS = {
    "missing": (
        lambda t: t.pop("layers.2.mlp.up_proj.weight"),
        "layers.2.mlp.up_proj.weight is missing",
    ),
    "unexpected": (lambda t: t.update(extra=t["fc.weight"] * 1), "extra is unexpected"),
    "mis-shaped": (
        lambda t: t.update({"norm.weight": t["norm.weight"][:5]}),
        "norm.weight has shape",
    ),
    "mask hidden": (lambda t: t.pop("mask_hidden"), "mask_hidden is missing"),
    "embeddings": (
        lambda t: t.update({"embed_tokens.weight": t["embed_tokens.weight"][:3]}),
        "embed_tokens.weight has",
    ),
    "d2t": (lambda t: t.update(d2t=t["d2t"] + 96), "names tokens outside"),
}


@pytest.mark.parametrize(("spoil", "words"), TENSOR_FAULTS.values(), ids=TENSOR_FAULTS.keys())
def test_tensor_faults(folder: Path, target: Target, spoil, words: str) -> None:
    edit_tensors(folder, spoil)
    assert any(words in text for text in levels(check(folder, target))["error"])


CONFIG_FAULTS = {
    "context": (lambda c: c.update(max_position_embeddings=64), "max_position_embeddings is 64"),
    "mask is a stop token": (lambda c: c.update(ptd_token_id=1, pard_token=1), "a stop token"),
    "two mask ids": (lambda c: c.update(ptd_token_id=6), "has different values"),
    "mask id vLLM 0.16 does not know": (
        lambda c: (c.pop("ptd_token_id"), c.pop("pard_token"), c.update(mask_token_id=5)),
        "read pard_token",
    ),
    "aux layers of another target": (
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 15, 27]),
        "aux layers [15, 27]",
    ),
    "another vocabulary": (lambda c: c.update(vocab_size=99), "vocabulary 99"),
}


@pytest.mark.parametrize(("spoil", "words"), CONFIG_FAULTS.values(), ids=CONFIG_FAULTS.keys())
def test_config_faults(folder: Path, target: Target, spoil, words: str) -> None:
    edit_config(folder, spoil)
    assert any(words in text for text in levels(check(folder, target))["error"])


def test_absent_aux_ids_are_a_warning(target: Target, tmp_path: Path) -> None:
    aws_layout(make_drafter(target, "p-eagle", 4), tmp_path / "d")
    by_level = levels(check(tmp_path / "d", target))
    assert any("no aux layer ids" in text for text in by_level["warning"])
    assert any("d2t with a full vocabulary" in text for text in by_level["warning"])
    assert by_level["error"] == []


def test_a_used_token_cannot_be_the_mask(real) -> None:
    assert "ordinary" in (used_token(real.target, 5000) or "")
    assert "chat template" in (used_token(real.target, 1) or "")
    assert used_token(real.target, 16) is None


def test_rows_without_a_token_may_be_masks() -> None:
    """GGUF files name unused rows [PADn]; such a name with another id is an ordinary token."""
    names = {5: "[PAD5]", 6: "[PAD5]"}
    tokenizer = SimpleNamespace(
        convert_ids_to_tokens=names.get,
        all_special_ids=[],
        added_tokens_decoder={},
        chat_template=None,
    )
    target: Any = SimpleNamespace(stop_ids=set(), tokenizer=tokenizer)
    assert used_token(target, 5) is None
    assert "ordinary" in (used_token(target, 6) or "")


def test_a_small_context_without_a_target_is_a_warning(tmp_path: Path) -> None:
    target = make_target(max_position_embeddings=2048)
    export(make_drafter(target, "eagle3", 1), tmp_path / "d", "speculators", 5, VERIFIER)
    assert any("only 2048" in text for text in levels(check(tmp_path / "d"))["warning"])


def test_a_window_that_vllm_ignores_is_a_warning(folder: Path, target: Target) -> None:
    edit_config(folder, lambda config: config.update(sliding_window=64))
    ignored = "sliding_window 64 has no effect, as in vLLM"
    assert any(ignored in text for text in levels(check(folder, target))["warning"])
    layer_types = ["sliding_attention"] * 3
    edit_config(folder, lambda config: config.update(layer_types=layer_types))
    assert "sliding window 64" in levels(check(folder, target))["ok"]
