"""A transformers model of a GGUF file: weights as stored, or dequantized to one dtype.

The model is built on the meta device and gets its tensors one by one: no dequantized copy of the
whole file exists, unless it is asked for.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from peagle.errors import UserError
from peagle.kernels.stored_matrix import StoredMatrix, Table
from peagle.progress import Progress, silent
from peagle.target.gguf.header import COPY_AGAIN, GGUFHeader
from peagle.target.gguf.modules import StoredEmbedding, StoredLinear
from peagle.target.gguf.rope import rope_factors, scaled_rope
from peagle.target.gguf.tensors import TensorReader


def load_model(
    header: GGUFHeader,
    folder: Path,
    dtype: torch.dtype,
    keep_stored: bool,
    progress: Progress = silent,
) -> PreTrainedModel:
    """`folder`: with the config. `dtype`: of the activations, and of dequantized weights.

    `keep_stored`: False dequantizes every tensor.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config.rope_parameters = scaled_rope(config, header)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    for name, tensor in TensorReader(header, model, keep_stored).read(progress):
        assign(model, name, tensor, dtype, header)
    tie_head(model)
    initialize_buffers(model)
    require_all(model, header)
    apply_rope_factors(model, rope_factors(header))
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def assign(
    model: PreTrainedModel, name: str, tensor: Table, dtype: torch.dtype, header: GGUFHeader
) -> None:
    """Give a parameter its tensor. A layer with a StoredMatrix is replaced.

    So is one with a narrower dtype than the model's: its weight is widened in every call.
    """
    path, _, kind = name.rpartition(".")
    module: Any = model.get_submodule(path)
    expected = tuple(getattr(module, kind).shape)
    if tuple(tensor.shape) != expected:
        raise UserError(
            f"{header.path}: tensor {name} has shape {list(tensor.shape)}, but the model needs"
            f" {list(expected)}: {COPY_AGAIN}"
        )
    if isinstance(tensor, StoredMatrix) or is_narrow(module, kind, tensor, dtype):
        model.set_submodule(path, stored_module(module, tensor, dtype))
    elif isinstance(module, StoredLinear):
        assert kind == "bias"
        module.bias = tensor.to(dtype)
    else:
        setattr(module, kind, nn.Parameter(tensor.to(dtype), requires_grad=False))


def is_narrow(module: nn.Module, kind: str, tensor: Tensor, dtype: torch.dtype) -> bool:
    return (
        dtype == torch.float32
        and tensor.dtype != torch.float32
        and kind == "weight"
        and type(module) in (nn.Linear, nn.Embedding)
    )


def stored_module(module: Any, weight: Table, dtype: torch.dtype) -> nn.Module:
    if isinstance(module, nn.Embedding):
        return StoredEmbedding(weight, dtype)
    bias = module.bias  # read already, or still on the meta device
    return StoredLinear(weight, None if bias is None else bias.detach())


def tie_head(model: PreTrainedModel) -> None:
    """Without an output matrix in the file, lm_head is the embedding's."""
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or not head.weight.is_meta:
        return
    if isinstance(embedding, StoredEmbedding):
        model.set_output_embeddings(StoredLinear(embedding.weight, head.bias))
    else:
        head.weight = embedding.weight


@torch.no_grad()
def initialize_buffers(model: PreTrainedModel) -> None:
    """Compute buffers that no file has, such as the frequencies of RoPE."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for module in model.modules():
        own = {name: x for name, x in module.named_buffers(recurse=False) if x.is_meta}
        for name, buffer in own.items():
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
        if own:
            model._init_weights(module)


def require_all(model: PreTrainedModel, header: GGUFHeader) -> None:
    missing = [name for name, x in model.named_parameters() if x.is_meta]
    missing += [
        f"{name}.bias"
        for name, module in model.named_modules()
        if isinstance(module, StoredLinear) and module.bias is not None and module.bias.is_meta
    ]
    if missing:
        raise UserError(
            f"{header.path} lacks {len(missing)} tensors of a {model.config.model_type} model, the"
            f" first is {missing[0]}: use another file"
        )


def apply_rope_factors(model: PreTrainedModel, factors: Tensor | None) -> None:
    """Divide the frequencies of RoPE by the factors that the file has for them (Llama 3.1)."""
    if factors is None:
        return
    for module in model.modules():
        for name in ("inv_freq", "original_inv_freq"):
            frequencies = getattr(module, name, None)
            if isinstance(frequencies, Tensor) and frequencies.shape == factors.shape:
                setattr(module, name, frequencies / factors)


def stored_format(model: PreTrainedModel) -> str | None:
    """The formats of the layers' weights that stay as stored, the most frequent first."""
    weights = [getattr(module, "weight", None) for module in model.get_decoder().modules()]
    sizes = Counter[str]()
    for weight in weights:
        if isinstance(weight, StoredMatrix) and weight is not model.get_input_embeddings().weight:
            sizes[weight.format] += weight.blocks.numel()
    return "/".join(name for name, _ in sizes.most_common()) or None
