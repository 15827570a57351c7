"""Tiny GPT-OSS checkpoints with random MXFP4 experts, in the layout of the published ones."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from peagle.paths import write_json
from tests.support.models.tiny_models import make_target

INDEX = "model.safetensors.index.json"
PROJECTIONS = ("gate_up_proj", "down_proj")


def save_mxfp4(folder: Path, files: int = 1, seed: int = 0, **sizes: Any) -> Any:
    """Write a checkpoint; return the model of transformers with the dequantized experts."""
    model: Any = make_target("gpt-oss", seed, **{"intermediate_size": 64} | sizes).model
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("_bias"):
            parameter.data.normal_(0, 0.5, generator=generator)
        parameter.data = parameter.data.bfloat16().float()
    tensors = {name: x.bfloat16() for name, x in model.state_dict().items()}
    for layer in range(len(model.model.layers)):
        name = f"model.layers.{layer}.mlp.experts"
        for projection in PROJECTIONS:
            tensors |= random_projection(model.get_submodule(name), name, projection, generator)
            del tensors[f"{name}.{projection}"]
    write_files(folder, tensors, files)
    config = model.config.to_dict() | {"dtype": "bfloat16", "architectures": [type(model).__name__]}
    write_json(folder / "config.json", config | {"quantization_config": {"quant_method": "mxfp4"}})
    model.generation_config.save_pretrained(folder)
    return model


def random_projection(
    experts: nn.Module, name: str, projection: str, generator: torch.Generator
) -> dict[str, Tensor]:
    """Give the experts random MXFP4 weights, and return these as stored."""
    parameter = getattr(experts, projection)
    count, inputs, outputs = parameter.shape
    shape = (count, outputs, inputs // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(121, 126, shape, dtype=torch.uint8, generator=generator)
    parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    prefix = f"{name}.{projection}"
    return {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}


def write_files(folder: Path, tensors: dict[str, Tensor], files: int) -> None:
    """Write tensors to the files in turn, so that each layer is in several files."""
    folder.mkdir(parents=True, exist_ok=True)
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = [f"model-{i:05}-of-{files:05}.safetensors" for i in range(1, files + 1)]
    weight_map = {name: names[i % files] for i, name in enumerate(sorted(tensors))}
    for file in names:
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    write_json(folder / INDEX, {"metadata": {}, "weight_map": weight_map})
