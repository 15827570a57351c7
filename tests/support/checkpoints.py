"""Checkpoints as other tools lay them out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.drafter import Drafter
from peagle.export.export import export
from peagle.target import Target
from tests.support.tiny_models import make_drafter

VERIFIER = {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}
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
    made = make_drafter(target, method, layers, vocab, **switches)
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():  # every tensor counts: no norm stays at 1, no bias at 0
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return made


def aws_layout(drafter: Drafter, folder: Path) -> None:
    """As released: identity d2t and t2d with a full vocabulary, llama3 RoPE, ptd_token_id alone, no aux ids."""
    export(drafter, folder, "vllm", 7, VERIFIER)
    config = json.loads((folder / "config.json").read_text())
    for key in (
        "pard_token",
        "eagle_config",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
    ):
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    vocab = drafter.config.vocab_size
    tensors |= {
        "d2t": torch.zeros(vocab, dtype=torch.long),
        "t2d": torch.ones(vocab, dtype=torch.bool),
    }
    save_file(tensors, folder / "model.safetensors")
