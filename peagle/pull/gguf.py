"""Convert a GGUF file to what other tools read: bf16 safetensors, config and tokenizer."""

from pathlib import Path

import torch

from peagle.paths import save_tensors
from peagle.progress import Progress, silent
from peagle.target.gguf.config_folder import convert_config
from peagle.target.gguf.header import read_header
from peagle.target.gguf.model import load_model


def convert(
    gguf: Path, folder: Path, digits_split: bool = False, progress: Progress = silent
) -> None:
    """Fill `folder` with model.safetensors (bf16), config.json, generation_config.json, tokenizer.

    `digits_split` restores the digit splitting of a tokenizer that lost it (SmolLM2).
    """
    header = read_header(gguf)
    convert_config(header, folder, digits_split)
    model = load_model(header, folder, torch.bfloat16, keep_stored=False, progress=progress)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_tensors(tensors, folder / "model.safetensors")
