"""What a GGUF file says about RoPE and transformers does not read: scaling, and factors."""

from typing import Any

import torch
from torch import Tensor

from peagle.errors import UserError
from peagle.target.gguf.header import GGUFHeader
from peagle.target.gguf.tensors import ROPE_FACTORS, dequantize

FULL_ATTENTION = "full_attention"
LONG_FACTORS = ("rope_factors_long", "rope_factors_short")


def rope_factors(header: GGUFHeader) -> Tensor | None:
    """Divisors of the frequencies [rotated dims / 2], with which Llama 3.1 extends its context."""
    info = header.tensors.get(ROPE_FACTORS)
    return None if info is None else dequantize(header, info).flatten().to(torch.float32)


def scaled_rope(config: Any, header: GGUFHeader) -> Any:
    """The RoPE parameters of the config with the scaling of the file."""
    refuse_long_factors(header)
    parameters = getattr(config, "rope_parameters", None)
    scaling = scaling_parameters(header)
    if not parameters or scaling is None:
        return parameters
    if all(isinstance(x, dict) for x in parameters.values()):
        # Of a type of layers each (Gemma 3): only attention to the whole context is scaled.
        full = parameters.get(FULL_ATTENTION)
        return parameters if full is None else parameters | {FULL_ATTENTION: merged(full, scaling)}
    return merged(parameters, scaling)


def merged(parameters: dict[str, Any], scaling: dict[str, Any]) -> dict[str, Any]:
    """Parameters that have a scaling already keep it."""
    return (
        parameters | scaling if parameters.get("rope_type", "default") == "default" else parameters
    )


def scaling_parameters(header: GGUFHeader) -> dict[str, Any] | None:
    """What the file says about scaling, in the terms of transformers; None: no scaling."""
    prefix = f"{header.architecture}.rope."
    kind = header.metadata.get(prefix + "scaling.type", "linear")  # as llama.cpp without a type
    factor = header.metadata.get(
        prefix + "scaling.factor", header.metadata.get(prefix + "scale_linear", 1.0)
    )
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = header.metadata.get(prefix + "scaling.original_context_length")
    if kind == "yarn" and original:
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise UserError(
        f"{header.path} scales RoPE as {kind!r}, which is not supported: use another file, or"
        " the model's safetensors"
    )


def refuse_long_factors(header: GGUFHeader) -> None:
    """Factors that depend on the length of the context (LongRoPE: Phi-3 with 128k tokens)."""
    found = [name for name in header.tensors if name.startswith(LONG_FACTORS)]
    if found:
        raise UserError(
            f"{header.path} scales RoPE with {found[0]} (LongRoPE), which is not supported: use"
            " another file, such as that of the model with a short context, or the model's"
            " safetensors"
        )
