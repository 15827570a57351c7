"""Convert a GGUF file to what other tools read: bf16 safetensors, config and tokenizer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
)

from peagle.errors import UserError
from peagle.paths import save_tensors
from peagle.progress import Progress, silent


def convert(
    gguf: Path, folder: Path, digits_split: bool = False, progress: Progress = silent
) -> None:
    """Fill `folder` with model.safetensors (bf16), config.json, generation_config.json, tokenizer.

    `digits_split` restores the digit splitting of a tokenizer that lost it (SmolLM2).
    """
    location: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
        "local_files_only": True,
    }
    config = AutoConfig.from_pretrained(**location, trust_remote_code=False)
    tensors = dequantize(gguf, config, progress)
    config.tie_word_embeddings = "lm_head.weight" not in tensors
    save_tensors(tensors, folder / "model.safetensors")
    config.save_pretrained(folder)
    generation = GenerationConfig(
        eos_token_id=config.eos_token_id, bos_token_id=config.bos_token_id
    )
    generation.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**location, trust_remote_code=False)
    save_tokenizer(tokenizer, config, folder, digits_split)


def dequantize(gguf: Path, config: PreTrainedConfig, progress: Progress) -> dict[str, torch.Tensor]:
    """Every weight in bf16 by its name in transformers, which undoes GGUF's head permutation."""
    from transformers import modeling_gguf_pytorch_utils as reader

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16

    def report_tensors(tensors: list[Any], **_: Any) -> Iterator[Any]:
        total = sum(int(tensor.n_bytes) for tensor in tensors)
        done = 0
        for tensor in tensors:
            yield tensor
            done += int(tensor.n_bytes)
            progress("converting to bf16", done, total)

    original_tqdm = reader.tqdm
    reader.tqdm = report_tensors  # two progress bars would overwrite each other
    try:
        tensors = reader.load_gguf_checkpoint(
            str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16
        )["tensors"]
    finally:
        reader.tqdm = original_tqdm
    missing = model.state_dict().keys() - tensors.keys() - {"lm_head.weight"}
    if missing:
        raise UserError(
            f"the GGUF file lacks {len(missing)} tensors of a {config.model_type} model"
            f" ({sorted(missing)[:3]}): use another file"
        )
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def save_tokenizer(
    tokenizer: Any, config: PreTrainedConfig, folder: Path, digits_split: bool
) -> None:
    """Save a GGUF tokenizer with its faults corrected.

    Those are the stop token, the clean-up of spaces, and for SmolLM2 the splitting of digits.
    """
    if digits_split:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
