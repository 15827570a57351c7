"""RoPE for one context: frequencies that are the same in every pass.

Two types of RoPE depend on the longest position of a pass. In a batch, a long request would change
the answers to short ones; rejected drafts would change the pass that rejects them; and keys in the
cache would have other frequencies than later queries. So the frequencies are chosen once, as for a
sequence that fills the context:

    longrope    the long factors if the context exceeds original_max_position_embeddings, the short
                ones otherwise (vLLM chooses by max_model_len in the same way)
    dynamic     dynamic NTK: the base for a sequence as long as the context, which is rope_theta
                itself up to max_position_embeddings
"""

import math
from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from peagle.errors import UserError

VLLM_ROPE_KEYS = ("short_mscale", "long_mscale")  # of longrope; transformers has others
FROZEN_TYPE = "default"  # the type for which transformers never updates frequencies


def depends_on_length(rope_type: str | None) -> bool:
    """Whether transformers updates the frequencies of this type in every pass."""
    return rope_type is not None and (rope_type == "longrope" or "dynamic" in rope_type)


def parameter_sets(config: Any) -> dict[str | None, Mapping[str, Any]]:
    """The RoPE parameters of a config by layer type; the key is None if all layers share them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(values, Mapping) for values in parameters.values()):
        return {layer_type: values or {} for layer_type, values in parameters.items()}
    return {None: parameters}


def config_depends_on_length(config: Any) -> bool:
    sets = parameter_sets(config).values()
    return any(depends_on_length(parameters.get("rope_type")) for parameters in sets)


def shortest_context(config: Any, context: int) -> int:
    """The shortest context with the same frequencies as `context`; 1 if all have the same."""
    shortest = 1
    for parameters in parameter_sets(config).values():
        rope_type = parameters.get("rope_type")
        if rope_type == "longrope":
            original = original_length(parameters, config.max_position_embeddings)
            shortest = max(shortest, original + 1) if context > original else shortest
        elif depends_on_length(rope_type) and context > config.max_position_embeddings:
            shortest = context
    return shortest


def freeze_parameters(
    parameters: Mapping[str, Any], context: int, max_positions: int, head_dim: int
) -> dict[str, Any]:
    """RoPE parameters that mean the same frequencies for every length: those for `context`.

    Of longrope, both lists become the chosen one. The scale of cosines and sines is given by the
    key that transformers reads and by those that vLLM reads.
    """
    rope_type = parameters.get("rope_type")
    if not depends_on_length(rope_type):
        return dict(parameters)
    if rope_type != "longrope":
        theta = dynamic_base(parameters, context, max_positions, head_dim)
        kept = {key: value for key, value in parameters.items() if key != "factor"}
        return kept | {"rope_type": "default", "rope_theta": theta}
    original = original_length(parameters, max_positions)
    chosen = "long" if context > original else "short"
    factors = list(parameters[f"{chosen}_factor"])
    scale = parameters.get(f"{chosen}_mscale") or longrope_scale(parameters, max_positions)
    return dict(parameters) | {
        "original_max_position_embeddings": original,
        "short_factor": factors,
        "long_factor": list(factors),
        "attention_factor": scale,
        "short_mscale": scale,
        "long_mscale": scale,
    }


def original_length(parameters: Mapping[str, Any], max_positions: int) -> int:
    """The longest sequence with the short factors of longrope."""
    return parameters.get("original_max_position_embeddings") or max_positions


def dynamic_base(
    parameters: Mapping[str, Any], context: int, max_positions: int, head_dim: int
) -> float:
    theta = parameters["rope_theta"]
    if context <= max_positions:
        return theta
    factor = parameters["factor"]
    dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    return theta * (factor * context / max_positions - (factor - 1)) ** (dim / (dim - 2))


def longrope_scale(parameters: Mapping[str, Any], max_positions: int) -> float:
    """The factor on cosines and sines, as transformers and vLLM compute it."""
    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]
    original = original_length(parameters, max_positions)
    factor = parameters.get("factor") or max_positions / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def freeze_rope(model: nn.Module, context: int) -> None:
    """Freeze every rotary embedding of a transformers model for this context."""
    for module in model.modules():
        if hasattr(module, "rope_type") and hasattr(module, "config"):
            freeze_module(module, context)


def freeze_module(module: Any, context: int) -> None:
    """Give a rotary embedding its frequencies for this context, which no pass updates.

    Its config becomes a copy with frozen parameters: some modules (Phi-MoE) read it in every pass.
    """
    if hasattr(module, "unfrozen_config"):
        require_same_rope(module, context)
        return
    types: dict[Any, str] = by_layer_type(module.rope_type)
    dependent = [key for key, rope_type in types.items() if depends_on_length(rope_type)]
    if not dependent:
        return
    for key in dependent:
        name = buffer_name(key, "inv_freq")
        frequencies = choose_frequencies(module, key, types[key], context)
        device = getattr(module, name).device
        module.register_buffer(name, frequencies.to(device), persistent=False)
    module.unfrozen_config = module.config
    module.frozen_context = context
    module.config = frozen_config(module.config, context)
    types |= dict.fromkeys(dependent, FROZEN_TYPE)
    module.rope_type = types.get(None, types)


def by_layer_type(rope_type: Any) -> dict[Any, str]:
    return dict(rope_type) if isinstance(rope_type, dict) else {None: rope_type}


def buffer_name(layer_type: str | None, name: str) -> str:
    return name if layer_type is None else f"{layer_type}_{name}"


def frozen_config(config: Any, context: int) -> Any:
    """A copy of the config with frozen RoPE parameters."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters: dict[Any, Any] = {
        key: freeze_parameters(values, context, config.max_position_embeddings, head_dim)
        for key, values in parameter_sets(config).items()
    }
    frozen = copy(config)
    frozen.rope_parameters = parameters.get(None, parameters)
    return frozen


def choose_frequencies(module: Any, key: str | None, rope_type: str, context: int) -> Tensor:
    """[rotated dims / 2]: computed on the CPU, so that every device has the same ones."""
    config = module.config
    if rope_type != "longrope" and context <= config.max_position_embeddings:
        return getattr(module, buffer_name(key, "original_inv_freq"))
    options = {} if key is None else {"layer_type": key}
    with torch.device("cpu"):
        return ROPE_INIT_FUNCTIONS[rope_type](config, seq_len=context, **options)[0]


def require_same_rope(module: Any, context: int) -> None:
    config = module.unfrozen_config
    before = module.frozen_context
    if shortest_context(config, context) != shortest_context(config, before):
        raise UserError(
            f"this model runs with the RoPE of a context of {before} tokens, and a context of"
            f" {context} needs another one: load the model again for another `context`"
        )
