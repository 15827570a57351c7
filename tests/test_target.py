"""Taps deliver transformers' hidden_states[l], in the pass that computes the logits, on every architecture."""

import pytest
import torch
from transformers import DynamicCache

from peagle.errors import UserError
from peagle.target import Target, default_aux_layer_ids
from tests.conftest import make_target


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


def test_rollback_equals_never_having_seen_it(any_target: Target, prompt) -> None:
    """Verify a wrong block, roll back, go on: logits and taps as without the block. Sliding windows included."""
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
            expected = target.model(ids[None, start : start + 100], past_key_values=theirs).logits[0]
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ids", [(8,), (-1, 2), (2, 99)])
def test_unknown_layers_are_refused(target: Target, ids: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="layers 0 to 7"):
        target.tap(ids)


def test_recurrent_targets_are_refused() -> None:
    target = make_target()
    target.model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UserError, match="cannot be rolled back"):
        Target(target.model, name="hybrid")


def test_default_ids() -> None:
    assert default_aux_layer_ids(30) == (2, 15, 27)
