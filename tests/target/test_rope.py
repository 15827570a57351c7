"""RoPE that depends on the length of a pass is fixed by the context of the target."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from peagle.core import Sampling
from peagle.errors import UserError
from peagle.reference import reference
from peagle.target import Target, load_target
from peagle.target.rope import freeze_module, freeze_parameters
from tests.support.engine.decoding import plain, tokens_of
from tests.support.models.rope_models import (
    BOUNDARY,
    DYNAMIC,
    longrope,
    rope_model,
    rope_target,
)
from tests.support.models.tiny_models import make_target

NAMES = ("phi3", "phi4", "llama", "phimoe", "gemma3", "dynamic")
CONTEXTS = (BOUNDARY - 1, BOUNDARY, BOUNDARY + 1, None)


def angles(model: Any, positions: Tensor) -> Tensor:
    """Cosines and sines of the full-attention layers, [positions, 2 * dims]."""
    rotary = model.get_decoder().rotary_emb
    layer = ("full_attention",) if isinstance(rotary.rope_type, dict) else ()
    return torch.cat(rotary(torch.zeros(1), positions[None], *layer), -1)[0]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "phimoe"])
def test_frequencies_equal_those_of_a_full_context(name: str, context: int | None) -> None:
    target = rope_target(name, context)
    positions = torch.arange(target.context)
    # One pass of transformers over the full context.
    expected = angles(rope_model(name), positions)
    for length in (3, target.context, 5):  # The order does not matter.
        assert torch.equal(angles(target.model, positions[:length]), expected[:length])


def test_phimoe_uses_the_factors_and_the_scale_of_its_context() -> None:
    """transformers 5.17 combines the long scale with the short factors; the model's own code and
    vLLM use the long factors.
    """
    positions = torch.arange(BOUNDARY + 9)
    for context, chosen in ((BOUNDARY, "short"), (BOUNDARY + 1, "long")):
        model = rope_target("phimoe", context).model
        factors = torch.tensor(longrope()[f"{chosen}_factor"])
        frequencies = 1 / (factors * 1e4 ** (torch.arange(0, 8, 2) / 8))
        scale = {"short": 1.1, "long": 1.3}[chosen]
        expected = (positions[:, None] * frequencies).cos() * scale
        for length in (4, len(positions)):
            torch.testing.assert_close(angles(model, positions[:length])[:, :4], expected[:length])


@pytest.mark.parametrize("name", NAMES)
def test_a_long_sequence_in_the_batch_has_no_effect(name: str) -> None:
    target = rope_target(name)
    target.tap((1, 2))
    ids = torch.randint(6, 96, (2, BOUNDARY + 6), generator=torch.Generator().manual_seed(1))
    expected = target.features(ids[:1, :10])
    batched = target.features(ids)
    torch.testing.assert_close(batched.taps[:1, :10], expected.taps, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("context", [BOUNDARY, None])
@pytest.mark.parametrize("name", NAMES)
def test_decoding_with_and_without_a_cache(name: str, context: int | None, prompt: Any) -> None:
    target = rope_target(name, context)
    target.tap(())
    ids = prompt(BOUNDARY - 12)
    count = 12 if target.context == BOUNDARY else 24
    whole = tokens_of(reference.decode(target, None, ids, 0, count, Sampling()))
    assert plain(target, ids, count) == whole


def test_the_factors_change_answers(prompt: Any) -> None:
    """Otherwise the tests in this file would prove nothing."""
    ids = prompt(20)
    short, long = (rope_target("phi3", context) for context in (BOUNDARY, BOUNDARY + 1))
    assert plain(short, ids, 20) != plain(long, ids, 20)


def test_the_context_of_a_target(target: Target) -> None:
    long = rope_target("phi3")
    assert (long.context, long.max_context, long.rope_context) == (128, 128, 128)
    assert long.shortest_context == BOUNDARY + 1
    assert [long.fit_context(n) for n in (5, 60, 500)] == [BOUNDARY + 1, 60, 128]
    short = rope_target("phi3", context=40)
    assert (short.context, short.max_context, short.shortest_context) == (40, 128, 1)
    assert rope_target("dynamic").shortest_context == 1
    assert (target.rope_context, target.shortest_context, target.fit_context(7)) == (None, 1, 7)
    # Limited to what the model supports.
    assert Target(make_target().model, context=1000).context == 256
    with pytest.raises(UserError, match="`context` is 1: use 2 or more"):
        Target(make_target().model, context=1)


def test_one_model_has_one_rope() -> None:
    model = rope_model("phi3")
    Target(model, context=60)
    assert Target(model).context == 128  # The factors are the same.
    with pytest.raises(UserError, match="load the model again for another `context`"):
        Target(model, context=BOUNDARY)


def test_loading_takes_a_context(tmp_path: Path, prompt: Any) -> None:
    rope_model("phi3").save_pretrained(tmp_path)
    loaded = load_target(tmp_path, torch.float32, "cpu", context=40)
    assert loaded.context == 40
    assert plain(loaded, prompt(9), 9) == plain(rope_target("phi3", 40), prompt(9), 9)


def rotary(parameters: dict[str, Any], positions: int = 32) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=positions,
        rope_parameters=parameters,
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("context", [20, 32, 33, 100])
def test_dynamic_base_of_any_context(context: int) -> None:
    """Contexts may exceed max_position_embeddings: a drafter may have fewer than its target."""
    theirs = rotary(dict(DYNAMIC))
    theirs(torch.zeros(1), torch.arange(context)[None])
    by_parameters = rotary(freeze_parameters(DYNAMIC, context, 32, 8))
    assert by_parameters.rope_type == "default"
    torch.testing.assert_close(by_parameters.inv_freq, theirs.inv_freq)
    frozen = rotary(dict(DYNAMIC))
    freeze_module(frozen, context)
    frozen(torch.zeros(1), torch.arange(1000)[None])
    torch.testing.assert_close(frozen.inv_freq, theirs.inv_freq)


def test_scale_keys_of_transformers_and_vllm() -> None:
    attention_factor = {"attention_factor": 1.7}
    for more, scale in (
        (attention_factor, 1.7),
        ({"factor": 1.0}, 1.0),
        ({"long_mscale": 1.3}, 1.3),
    ):
        frozen = freeze_parameters(longrope() | more, 128, 128, 8)
        keys = ("attention_factor", "short_mscale", "long_mscale")
        assert [frozen[key] for key in keys] == [scale] * 3
    theirs = rotary(longrope(), 128).attention_scaling
    assert freeze_parameters(longrope(), 128, 128, 8)["attention_factor"] == theirs
    assert freeze_parameters({"rope_type": "yarn"}, 9, 9, 8) == {"rope_type": "yarn"}
