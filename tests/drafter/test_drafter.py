"""Layers of a drafter equal Llama layers of transformers; checks of a configuration."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from peagle.drafter.block import Block
from peagle.drafter.config import config_for
from peagle.drafter.model import causal_attend
from peagle.errors import UserError
from peagle.target import Target
from tests.support.models.tiny_models import AUX, MASK, make_drafter, make_target


def test_plain_layers_are_llama_layers(target: Target) -> None:
    config = config_for(target, "p-eagle", 2, AUX, MASK)
    block = Block(config, layer=1)
    llama = LlamaConfig(
        **{
            key: getattr(target.config, key)
            for key in ("hidden_size", "intermediate_size", "head_dim")
        }
    )
    llama.num_attention_heads = 4
    llama.num_key_value_heads = 2
    llama.rms_norm_eps = config.rms_norm_eps
    llama._attn_implementation = "eager"
    theirs = LlamaDecoderLayer(llama, 0)
    theirs.load_state_dict(block.state_dict())
    hidden = torch.randn(11, config.hidden_size)
    positions = torch.arange(3, 14)
    cos, sin = LlamaRotaryEmbedding(llama)(hidden, positions[None])
    mask = torch.full((11, 11), -torch.inf).triu(1)[None, None]
    expected = theirs(hidden[None], attention_mask=mask, position_embeddings=(cos, sin))
    ours = block(hidden, hidden, (cos[0, :, None], sin[0, :, None]), causal_attend)
    torch.testing.assert_close(ours, expected[0], rtol=1e-4, atol=1e-5)


def test_mask_rows_get_the_learned_embedding(target: Target) -> None:
    drafter = make_drafter(target, "p-eagle", 1)
    drafter.mask_embedding.data.fill_(3)
    embeds = drafter.embed(torch.tensor([MASK, 7]))
    assert torch.equal(embeds[0], torch.full_like(embeds[0], 3))
    assert torch.equal(embeds[1], target.embedding[7])


def test_frozen_tensors_are_shared_not_copied(target: Target) -> None:
    drafter = make_drafter(target, "p-eagle", 1)
    assert drafter.embed_tokens.data_ptr() == target.embedding.data_ptr()
    assert drafter.lm_head.data_ptr() == target.lm_head.data_ptr()
    assert "embed_tokens" not in drafter.state_dict()


def test_rope_stays_float32(target: Target) -> None:
    """Rounded frequencies would give wrong angles, and would differ after reloading."""
    drafter = make_drafter(target, "p-eagle", 1)
    frequencies = drafter.rope.inv_freq.clone()
    assert drafter.to(torch.bfloat16).rope.inv_freq.dtype == torch.float32
    assert torch.equal(drafter.rope.inv_freq, frequencies)


def test_untrained_drafters_are_reproducible_with_a_seed(target: Target) -> None:
    one, two = make_drafter(target, "p-eagle", 2), make_drafter(target, "p-eagle", 2)
    assert all(
        torch.equal(a, b)
        for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"hidden_size": 64}, "hidden size 64"),
        ({"vocab_size": 50}, "vocabulary 50"),
        ({"num_hidden_layers": 4}, r"aux layers \[6\]"),
    ],
)
def test_mismatches_with_the_target_are_named(
    target: Target, overrides: dict[str, int], words: str
) -> None:
    other = make_target(**overrides)
    ids = (1, 3, 6) if "num_hidden_layers" in overrides else AUX
    config = config_for(
        target if "num_hidden_layers" in overrides else other, "p-eagle", 1, ids, MASK
    )
    with pytest.raises(UserError, match=words):
        config.require_fit(other if "num_hidden_layers" in overrides else target)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask_token_id": None}, "needs a mask token"),
        ({"mask_token_id": 96}, "outside the vocabulary"),
        ({"aux_layer_ids": (3, 1, 6)}, "must be ascending"),
        ({"aux_layer_ids": (1, 3)}, "has 2 ids, but fc takes 3"),
        ({"num_kv_heads": 3}, "not a multiple of the 3 key-value heads"),
    ],
)
def test_impossible_configurations(target: Target, change: dict, words: str) -> None:
    config = config_for(target, "p-eagle", 1, AUX, MASK)
    with pytest.raises(UserError, match=words):
        replace(config, **change)


def test_gemma_drafters_use_the_full_attention_rope() -> None:
    config = config_for(make_target("gemma3"), "eagle3", 1, AUX)
    assert config.rope["rope_type"] == "default"
    assert "rope_theta" in config.rope
