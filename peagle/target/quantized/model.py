"""A transformers model of a quantized target.

Linear layers are dequantized; their 8-bit weights are kept for kernels as well. 8-bit experts stay
as stored and are never dequantized as a whole.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from peagle.target.experts.omitted_modules import omit_modules
from peagle.target.quantized.codes import QuantizedWeight
from peagle.target.quantized.expert_layer import find_expert_layers
from peagle.target.quantized.read import read_quantized


def load_quantized(
    folder: Path, options: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any], dict[str, QuantizedWeight]]:
    """The model, its loading info, and the weights of linear layers that kernels can read."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    del config.quantization_config
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    stored = read_quantized(folder, options["dtype"], find_expert_layers(empty))
    model_class: Any = omit_modules(type(empty), stored.experts)
    model, info = model_class.from_pretrained(
        None, config=config, state_dict=stored.tensors, trust_remote_code=False, **options
    )
    for name, experts in stored.experts.items():
        model.set_submodule(name, experts)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return model, info, {name: x for name, x in stored.weights.items() if name in linear}
