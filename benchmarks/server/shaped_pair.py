"""A pair of random weights in the shape of Llama-3.1-8B, written to a folder.

    python -m benchmarks.server.shaped_pair FOLDER TOKENIZER_FOLDER [cuda]

Speed does not depend on the weights, but acceptance does: use a fixed K. The folder takes 20 GB.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from peagle.drafter.config import config_for
from peagle.drafter.formats import compact
from peagle.drafter.untrained import untrained_drafter
from peagle.target import Target

SHAPE: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DRAFTER_LAYERS = 4
MASK_TOKEN = 128255


def write_pair(folder: Path, tokenizer: Path, device: str) -> None:
    """Write `target` and `p-eagle`; `tokenizer`: a target's folder, whose tokenizer is copied."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**SHAPE), dtype=torch.bfloat16, trust_remote_code=False
        )
    model.save_pretrained(folder / "target")
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, folder / "target")
    target = Target(model, name=str(folder / "target"))
    config = config_for(target, "p-eagle", DRAFTER_LAYERS, None, MASK_TOKEN, trained=False)
    compact.save(untrained_drafter(config, target), folder / "p-eagle", target)


if __name__ == "__main__":
    write_pair(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "cuda")
