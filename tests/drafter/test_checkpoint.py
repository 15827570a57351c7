"""Drafter formats: written files, loading, and equal drafts after a round trip."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.drafter import Drafter
from peagle.drafter.formats import checkpoint, compact
from peagle.errors import UserError
from peagle.export.export import export, same_drafts
from peagle.target import Target
from tests.support.models.checkpoints import VERIFIER, aws_layout
from tests.support.models.tiny_models import AUX, MASK, add_noise, make_drafter, make_target

KINDS = {
    "p-eagle full": ("p-eagle", 4, None, {}),
    "p-eagle pruned": ("p-eagle", 3, 40, {}),
    "p-eagle norms": ("p-eagle", 2, None, {"norm_before_residual": True, "norm_before_fc": True}),
    "p-eagle bias": ("p-eagle", 2, None, {"attention_bias": True}),
    "eagle3 full": ("eagle3", 1, None, {}),
    "eagle3 pruned": (
        "eagle3",
        1,
        24,
        {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    ),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def drafter(request: pytest.FixtureRequest, target: Target) -> Drafter:
    method, layers, vocab, switches = request.param
    drafter = make_drafter(target, method, layers, vocab, **switches)
    add_noise(drafter, 0.1)
    return drafter


@pytest.mark.parametrize("to", ["peagle", "vllm", "speculators"])
def test_round_trip(drafter: Drafter, target: Target, tmp_path: Path, to: str) -> None:
    folder = tmp_path / "d"
    if to == "peagle":
        compact.save(drafter, folder, target)
    else:
        export(drafter, folder, to, 5, VERIFIER)
    read = checkpoint.read(folder)
    assert read.format == to
    assert read.problems() == []
    back = checkpoint.load(folder, target)
    for field in (
        "trained",
        "target",
        "method",
        "aux_layer_ids",
        "mask_token_id",
        "norm_before_residual",
        "fc_norm",
        "norm_output",
        "rope",
    ):
        assert getattr(back.config, field) == getattr(drafter.config, field), field
    assert same_drafts(drafter, back, 6) == (48, 48)
    if to != "peagle":  # A complete folder loads without a target.
        assert same_drafts(drafter, checkpoint.load(folder, None), 6) == (48, 48)


def test_compact_folders_omit_tensors_of_the_target(target: Target, tmp_path: Path) -> None:
    drafter = make_drafter(target, "p-eagle", 4, draft_vocab=40)
    drafter.mask_embedding.data.add_(1)
    compact.save(drafter, tmp_path / "d", target, torch.bfloat16)
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    assert "embed_tokens.weight" not in tensors
    assert "lm_head.weight" not in tensors
    assert tensors["mask_embedding"].shape == (target.hidden_size,)
    assert tensors["target_ids"].shape == (40,)
    known = json.loads((tmp_path / "d" / "config.json").read_text())
    assert known["target"] == "tiny llama"
    assert known["aux_layer_ids"] == list(AUX)
    assert known["mask_token_id"] == MASK


def test_trained_embeddings_are_kept(target: Target, tmp_path: Path) -> None:
    drafter = make_drafter(target, "p-eagle", 1)
    drafter.embed_tokens = drafter.embed_tokens + 0.5
    compact.save(drafter, tmp_path / "d", target)
    back = checkpoint.load(tmp_path / "d", target)
    assert torch.equal(back.embed_tokens, drafter.embed_tokens)


def test_aws_layout_loads(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 128}
    target = make_target(rope_parameters=rope)
    drafter = make_drafter(target, "p-eagle", 4)
    aws_layout(drafter, tmp_path / "d")
    back = checkpoint.load(tmp_path / "d", target)
    assert back.config.aux_layer_ids == (2, 4, 5)  # vLLM's default for eight layers
    assert back.config.rope == rope
    assert back.target_ids is None
    assert same_drafts(drafter, back, 7) == (56, 56)


def test_a_model_prefix_is_supported(target: Target, tmp_path: Path) -> None:
    drafter = make_drafter(target, "p-eagle", 2)
    export(drafter, tmp_path / "d", "vllm", 7, VERIFIER)
    file = tmp_path / "d" / "model.safetensors"
    renamed = {
        n if n in ("lm_head.weight", "mask_hidden") else f"model.{n}": t
        for n, t in load_file(file).items()
    }
    save_file(renamed, file)
    assert same_drafts(drafter, checkpoint.load(tmp_path / "d", target), 4) == (32, 32)


def test_native_config_has_every_key_vllm_needs(target: Target, tmp_path: Path) -> None:
    export(make_drafter(target, "p-eagle", 4, draft_vocab=40), tmp_path / "d", "vllm", 7, VERIFIER)
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["ptd_token_id"] == config["pard_token"] == MASK
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(AUX)
    assert config["max_position_embeddings"] == target.context
    assert (config["vocab_size"], config["draft_vocab_size"]) == (96, 40)
    assert config["tie_word_embeddings"] is False
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    assert tensors["mask_hidden"].shape == (1, 1, 3 * target.hidden_size)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape[1] == 2 * target.hidden_size
    assert torch.equal(tensors["d2t"] + torch.arange(40), tensors["t2d"].nonzero()[:, 0])


def test_full_vocabulary_has_no_d2t(target: Target, tmp_path: Path) -> None:
    export(make_drafter(target, "p-eagle", 1), tmp_path / "d", "vllm", 7, VERIFIER)
    assert "d2t" not in load_file(tmp_path / "d" / "model.safetensors")


def test_a_bf16_export_does_not_change_the_drafter(target: Target, tmp_path: Path) -> None:
    drafter = make_drafter(target, "p-eagle", 4)
    export(drafter, tmp_path / "d", "speculators", 8, VERIFIER, torch.bfloat16)
    assert drafter.fc.weight.dtype == torch.float32
    assert checkpoint.load(tmp_path / "d", None).fc.weight.dtype == torch.bfloat16


def test_a_failed_export_keeps_the_old_folder(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make_drafter(target, "p-eagle", 1)
    export(drafter, tmp_path / "d", "vllm", 3, VERIFIER)
    before = (tmp_path / "d" / "model.safetensors").read_bytes()
    monkeypatch.setattr("peagle.export.export.same_drafts", lambda *_: (1, 2))
    with pytest.raises(UserError, match="nothing was written"):
        export(make_drafter(target, "p-eagle", 2), tmp_path / "d", "vllm", 3, VERIFIER)
    assert (tmp_path / "d" / "model.safetensors").read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["d"]


def edit(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": None} | changes))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: (d / "config.json").unlink(), "config.json is missing"),
        (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
        (lambda d: (d / "model.safetensors").write_bytes(b"junk"), "cannot be read"),
        (lambda d: (d / "model.safetensors").unlink(), "no .safetensors file"),
        (
            lambda d: (d / "config.json").write_text('{"model_type": "bert"}'),
            "no known drafter format",
        ),
        (
            lambda d: (d / "config.json").write_text('{"model_type": "llama"}'),
            "lacks 'hidden_size'",
        ),
        (lambda d: (d / "config.json").write_text("[]"), "not a JSON object"),
        (lambda d: edit(d, hidden_size="32"), "not a valid drafter configuration"),
        (lambda d: edit(d, ptd_token_id="x"), "not a valid drafter configuration"),
        (
            lambda d: edit(d, rope_scaling={"rope_type": "nonsense"}),
            "not a valid drafter configuration",
        ),
    ],
)
def test_broken_folders(target: Target, tmp_path: Path, damage, words: str) -> None:
    export(make_drafter(target, "p-eagle", 1), tmp_path / "d", "vllm", 3, VERIFIER)
    damage(tmp_path / "d")
    with pytest.raises(UserError, match=words):
        checkpoint.load(tmp_path / "d", target)


def test_unknown_keys_are_refused_with_a_suggestion(target: Target, tmp_path: Path) -> None:
    compact.save(make_drafter(target, "p-eagle", 1), tmp_path / "d", target)
    path = tmp_path / "d" / "config.json"
    path.write_text(path.read_text().replace('"mask_token_id"', '"mask_tokenid"'))
    with pytest.raises(UserError, match="Did you mean 'mask_token_id'"):
        checkpoint.read(tmp_path / "d")
