"""Taps are hidden_states[l] of transformers, captured in the pass that computes the logits."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache, RecurrentGemmaConfig

from peagle.errors import UserError
from peagle.target import Target, default_aux_layer_ids, load_target
from tests.support.models.tiny_models import make_target


def test_taps_equal_hidden_states(any_target: Target, prompt) -> None:
    ids = torch.tensor(prompt(20))
    ids_of_taps = (0, 2, 5, 7)
    any_target.tap(ids_of_taps)
    out = any_target.forward(ids)
    with torch.inference_mode():
        theirs = any_target.model(ids[None], output_hidden_states=True, use_cache=False)
    expected = torch.cat([theirs.hidden_states[i][0] for i in ids_of_taps], -1)
    torch.testing.assert_close(out.hidden, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(out.logits, theirs.logits[0], rtol=0, atol=1e-5)


def test_one_pass_over_each_layer(target: Target, prompt) -> None:
    calls = []
    hooks = [layer.register_forward_hook(lambda *_: calls.append(1)) for layer in target.layers]
    target.tap((1, 4))
    target.forward(torch.tensor(prompt(5)), target.new_cache())
    for hook in hooks:
        hook.remove()
    assert len(calls) == len(target.layers)


def test_rollback_removes_a_rejected_block(any_target: Target, prompt) -> None:
    """After a wrong block and a rollback, logits and taps are those without the block."""
    ids, wrong = torch.tensor(prompt(24)), torch.tensor(prompt(7))
    any_target.tap((2, 6))
    cache = any_target.new_cache()
    any_target.forward(ids[:14], cache)
    any_target.forward(wrong, cache)
    cache.rollback(14)
    out = any_target.forward(ids[14:], cache)
    whole = any_target.forward(ids)
    torch.testing.assert_close(out.logits, whole.logits[14:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.hidden, whole.hidden[14:], rtol=1e-4, atol=1e-4)


def test_cache_grows_past_its_first_capacity(prompt) -> None:
    target = make_target(max_position_embeddings=1024)
    ids = torch.randint(3, 96, (700,))
    cache, theirs = target.new_cache(), DynamicCache()
    for start in range(0, 700, 100):
        ours = target.forward(ids[start : start + 100], cache).logits
        with torch.inference_mode():
            expected = target.model(ids[None, start : start + 100], past_key_values=theirs).logits[
                0
            ]
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ids", [(8,), (-1, 2), (2, 99)])
def test_unknown_layers_are_refused(target: Target, ids: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="layers 0 to 7"):
        target.tap(ids)


def test_recurrent_targets_are_refused() -> None:
    """RecurrentGemma keeps a state in its layers, outside of the cache."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "attention_window_size": 16,
        "lru_width": 32,
    }
    model = AutoModelForCausalLM.from_config(RecurrentGemmaConfig(**sizes, **heads))
    with pytest.raises(UserError, match="cannot be rolled back"):
        Target(model, name="recurrent").require_rollback()


def test_attention_targets_can_be_rolled_back(any_target: Target) -> None:
    any_target.require_rollback()


def remove_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove_tensor, "lacks 1 tensors"),
        (lambda f: (f / "config.json").write_text("[]"), "cannot load"),
        (lambda f: (f / "model.safetensors").write_bytes(b"short"), "cannot load"),
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    ],
)
def test_broken_target_folders(tmp_path: Path, damage, words: str) -> None:
    make_target().model.save_pretrained(tmp_path)
    load_target(tmp_path, torch.float32, "cpu")
    damage(tmp_path)
    with pytest.raises(UserError, match=words):
        load_target(tmp_path, torch.float32, "cpu")


def test_default_ids() -> None:
    assert default_aux_layer_ids(30) == (2, 15, 27)
