"""Read a GPT-OSS checkpoint with MXFP4 experts, which stay as they are stored.

The model is built on the meta device, without memory for its experts. Files are read one after
another, and each tensor goes to the device at once: the most memory is that of the checkpoint there
and that of one file on the host.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from peagle.errors import UserError
from peagle.target.experts.mxfp4_layout import (
    DOWNLOAD_AGAIN,
    MXFP4,
    PROJECTIONS,
    expert_sizes,
    find_experts,
    read_matrices,
    stored_experts,
)
from peagle.target.gguf.model import initialize_buffers
from peagle.target.quantized.shards import read_shard, shard_paths

MXFP4_EXPERTS = "mxfp4 experts"  # `Target.format`


def has_mxfp4(folder: Path) -> bool:
    """Whether config.json says that experts are in MXFP4.

    A config.json that cannot be read gives False: loading the target reports the error.
    """
    try:
        content = json.loads((folder / "config.json").read_text())["quantization_config"]
        return content["quant_method"] == MXFP4
    except (OSError, ValueError, KeyError, TypeError):
        return False


def load_mxfp4(folder: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A model with StoredExperts; `dtype`: of the other weights and of the activations."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    modules = find_experts(model)
    if not modules:
        raise UserError(
            f"the target in {folder} is a {config.model_type} model in mxfp4, which is read for"
            " GPT-OSS only: use a checkpoint in bfloat16, fp8 or int8"
        )
    tensors = read_tensors(folder, model, set(modules), dtype, device)
    for name, module in modules.items():
        sizes = expert_sizes(module)
        gate_up, down = (read_matrices(tensors, name, x, sizes, dtype) for x in PROJECTIONS)
        model.set_submodule(name, stored_experts(module, gate_up, down))
    finish_model(model, folder)
    return model


def read_tensors(
    folder: Path, model: PreTrainedModel, experts: set[str], dtype: torch.dtype, device: str
) -> dict[str, Tensor]:
    """Give the model its parameters; return the tensors of the modules `experts`, by name."""
    expert_tensors: dict[str, Tensor] = {}
    parameters = dict(model.named_parameters())
    for path in shard_paths(folder):
        for name, tensor in read_shard(path).items():
            module, _, kind = name.rpartition(".")
            if module in experts:
                expert_tensors[name] = tensor.to(device)
            elif name in parameters:
                require_shape(name, tensor, parameters[name])
                weight = nn.Parameter(tensor.to(device, dtype), requires_grad=False)
                setattr(model.get_submodule(module), kind, weight)
    return expert_tensors


def require_shape(name: str, tensor: Tensor, expected: Tensor) -> None:
    if tensor.shape != expected.shape:
        raise UserError(
            f"tensor {name} has shape {list(tensor.shape)}, but the config needs"
            f" {list(expected.shape)}: {DOWNLOAD_AGAIN}"
        )


def finish_model(model: Any, folder: Path) -> None:
    """Tie and compute what no file has, and require everything else."""
    if model.config.tie_word_embeddings:
        model.tie_weights()
    initialize_buffers(model)
    if missing := [name for name, x in model.named_parameters() if x.is_meta]:
        raise UserError(
            f"the target in {folder} lacks {len(missing)} tensors, the first is {missing[0]}:"
            f" {DOWNLOAD_AGAIN}"
        )
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
