"""What a GGUF file says about RoPE and transformers does not read: scaling, and factors."""

from typing import Any

import torch
from torch import Tensor

from peagle.errors import UserError
from peagle.target.gguf.header import GGUFHeader
from peagle.target.gguf.tensors import ROPE_FACTORS, dequantize


def rope_factors(header: GGUFHeader) -> Tensor | None:
    """Divisors of the frequencies [rotated dims / 2], with which Llama 3.1 extends its context."""
    info = header.tensors.get(ROPE_FACTORS)
    return None if info is None else dequantize(header, info).flatten().to(torch.float32)


def scaled_rope(config: Any, header: GGUFHeader) -> Any:
    """The RoPE parameters of the config with the scaling of the file."""
    parameters = getattr(config, "rope_parameters", None)
    prefix = f"{header.architecture}.rope.scaling."
    scaling = header.metadata.get(prefix + "type", "none")
    factor = header.metadata.get(prefix + "factor", 1.0)
    if not parameters or parameters.get("rope_type", "default") != "default":
        return parameters
    if scaling == "none" or factor == 1.0:
        return parameters
    if scaling == "linear":
        return parameters | {"rope_type": "linear", "factor": factor}
    original = header.metadata.get(prefix + "original_context_length")
    if scaling == "yarn" and original:
        return parameters | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise UserError(
        f"{header.path} scales RoPE as {scaling!r}, which is not supported: use another file, or"
        " the model's safetensors"
    )
