"""Controls of the parity tests: each fault in a tiny drafter must change its drafts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed: run `make test-vllm`")

import torch
from parity_cases import CASES, MASK_ID
from parity_models import tiny_drafter, tiny_prompts, tiny_target
from torch import nn

from peagle.drafter import Drafter
from peagle.drafter.block import Block
from peagle.reference import reference

pytestmark = pytest.mark.vllm


def fill(name: str, value: float) -> Callable[[Drafter], None]:
    def fault(drafter: Drafter) -> None:
        drafter.get_parameter(name).fill_(value)

    return fault


def lose_mask_embedding(drafter: Drafter) -> None:
    assert drafter.mask_embedding is not None
    drafter.mask_embedding.copy_(drafter.embed_tokens[MASK_ID])


def lose_eps(drafter: Drafter) -> None:
    for module in drafter.modules():
        if isinstance(module, nn.RMSNorm):
            module.eps = 1e-6


def lose_theta(drafter: Drafter) -> None:
    drafter.rope = Drafter.make_rope(
        replace(drafter.config, rope={"rope_type": "default", "rope_theta": 10000.0})
    )


def lose_last_layer(drafter: Drafter) -> None:
    drafter.layers = drafter.layers[:-1]


def swap_taps(drafter: Drafter) -> None:
    first, *others = drafter.fc.weight.chunk(drafter.config.num_taps, 1)
    drafter.fc.weight.copy_(torch.cat([*others, first], 1))


def flip_residual(drafter: Drafter) -> None:
    first = drafter.layers[0]
    assert isinstance(first, Block)
    first.norm_before_residual = not first.norm_before_residual


FAULTS: dict[str, Callable[[Drafter], None]] = {
    "mask_hidden lost": fill("mask_hidden", 0),
    "mask embedding lost": lose_mask_embedding,
    "hidden_norm without weights": fill("layers.0.hidden_norm.weight", 1),
    "last norm without weights": fill("norm.weight", 1),
    "eps lost": lose_eps,
    "RoPE theta lost": lose_theta,
    "a layer lost": lose_last_layer,
    "taps in another order": swap_taps,
    "the other residual": flip_residual,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_the_drafts(fault: str, tmp_path: Path) -> None:
    case = CASES[0]
    target = tiny_target(case, tmp_path / "target")
    right = tiny_drafter(case, target)
    wrong = tiny_drafter(case, target)
    FAULTS[fault](wrong)
    target.tap(right.config.aux_layer_ids or ())
    same = 0
    total = 0
    for prompt in tiny_prompts(replace(case, prompts=tuple(range(3, 43)))):
        ids = torch.tensor(prompt)
        g = target.forward(ids[:-1]).hidden
        expected = reference.propose(right, g, ids, case.k)
        same += int((reference.propose(wrong, g, ids, case.k) == expected).all())
        total += 1
    # A parity case compares about a hundred proposals, so a fault in a quarter of them is detected.
    assert same < total * 3 / 4
