"""Checkpoints in the layouts of other tools."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from peagle.drafter import Drafter
from peagle.drafter.formats.speculators import VerifierConfig
from peagle.export.export import export

VERIFIER = VerifierConfig("tiny", ["LlamaForCausalLM"])


def aws_layout(drafter: Drafter, folder: Path) -> None:
    """The layout of AWS: identity d2t and t2d, llama3 RoPE, ptd_token_id, no aux layer ids."""
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
