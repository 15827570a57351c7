"""The RoPE of a drafter is fixed in its config: training, the engine and vLLM use the same."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from peagle.core import Sampling
from peagle.drafter import Drafter
from peagle.drafter.config import config_for
from peagle.drafter.formats import checkpoint
from peagle.drafter.formats.speculators import VerifierConfig
from peagle.export.export import export
from peagle.reference import reference
from peagle.reference.decode import decode
from peagle.reference.proposer import proposer_for
from tests.support.models.rope_models import AUX, BOUNDARY, longrope, rope_drafter, rope_target
from tests.support.models.tiny_models import MASK

VERIFIER = VerifierConfig("tiny", ["Phi3ForCausalLM"])
SCALE_KEYS = ("attention_factor", "short_mscale", "long_mscale")


def angles(drafter: Drafter, length: int = 9) -> Tensor:
    return torch.cat(drafter.rope(torch.zeros(1), torch.arange(length)[None]), -1)[0]


@pytest.mark.parametrize(("context", "chosen"), [(BOUNDARY, "short"), (None, "long")])
def test_both_longrope_lists_have_the_chosen_factors(
    context: int | None, chosen: str, tmp_path: Path
) -> None:
    """vLLM chooses factors by max_model_len, so both lists have the factors of training."""
    target = rope_target("phi3", context)
    drafter = rope_drafter(target)
    export(drafter, tmp_path / "d", "vllm", 3, VERIFIER)
    written = json.loads((tmp_path / "d" / "config.json").read_text())
    rope = written["rope_scaling"]
    factors = longrope()[f"{chosen}_factor"]
    assert rope["short_factor"] == rope["long_factor"] == factors
    assert {rope[key] for key in SCALE_KEYS} == {drafter.rope.attention_scaling}
    assert written["max_position_embeddings"] == target.max_context
    back = checkpoint.load(tmp_path / "d", None)
    assert back.config.rope == drafter.config.rope
    assert torch.equal(angles(back), angles(drafter))


def test_dynamic_ntk_is_written_as_a_plain_base(tmp_path: Path) -> None:
    """Versions of vLLM scale the base of dynamic NTK differently, so a plain base is written."""
    drafter = rope_drafter(rope_target("dynamic"))
    assert drafter.config.rope == {"rope_type": "default", "rope_theta": 1e4}
    export(drafter, tmp_path / "d", "vllm", 3, VERIFIER)
    written = json.loads((tmp_path / "d" / "config.json").read_text())
    assert (written["rope_theta"], written["rope_scaling"]) == (1e4, None)


@pytest.mark.parametrize("context", [BOUNDARY, None])
def test_an_external_drafter_uses_the_factors_of_the_context(
    context: int | None, tmp_path: Path
) -> None:
    """Its config keeps both lists of factors; vLLM chooses by the context, too."""
    target = rope_target("phi3", context)
    external = replace(rope_drafter(target).config, rope=longrope())
    drafter = Drafter(external)
    drafter.set_embed_and_head(target.embedding, target.lm_head)
    export(drafter, tmp_path / "d", "vllm", 3, VERIFIER)
    back = checkpoint.load(tmp_path / "d", target, torch.bfloat16)
    assert back.config.rope == longrope()
    expected = angles(rope_drafter(target), BOUNDARY + 5)
    for length in (4, BOUNDARY + 5):  # The length of a pass has no effect.
        assert torch.equal(angles(back, length), expected[:length])
    assert torch.equal(angles(back.to(torch.float32)), expected[:9])


def test_the_original_length_may_be_outside_of_rope_scaling(tmp_path: Path) -> None:
    drafter = rope_drafter(rope_target("phi3"))
    export(drafter, tmp_path / "d", "vllm", 3, VERIFIER)
    file = tmp_path / "d" / "config.json"
    written = json.loads(file.read_text())
    length = written["rope_scaling"].pop("original_max_position_embeddings")
    file.write_text(json.dumps(written | {"original_max_position_embeddings": length}))
    assert checkpoint.load(tmp_path / "d", None).config.rope == drafter.config.rope
    file.write_text(json.dumps(written))  # Without it, it is the context, as in transformers.
    assert checkpoint.load(tmp_path / "d", None).rope.inv_freq.equal(drafter.rope.inv_freq)


@pytest.mark.parametrize("name", ["phi3", "phi4"])
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_proposals_across_the_boundary_with_and_without_a_cache(name: str, method) -> None:
    target = rope_target(name)
    config = config_for(target, method, 1, AUX, MASK, trained=False)
    assert config.rope["short_factor"] == config.rope["long_factor"]
    drafter = rope_drafter(target, method)
    target.tap(AUX)
    prompt = torch.randint(6, 96, (BOUNDARY - 6,), generator=torch.Generator().manual_seed(2))
    ids = prompt.tolist()
    whole = reference.decode(target, drafter, ids, 3, 12, Sampling())
    cached = list(decode(target, proposer_for(drafter), ids, 3, 20, Sampling()))
    assert cached[: len(whole)] == whole
