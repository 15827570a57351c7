"""Random MXFP4 experts of a GPT-OSS, made on the device as they are stored.

Dense experts are never in memory: those of gpt-oss-120b would take 230 GB, and take 61 GB here.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from peagle.errors import UserError
from peagle.kernels.expert_matrices import MXFP4_BIAS, MXFP4_BLOCK, MXFP4_VALUES, ExpertMatrices
from peagle.target.experts.mxfp4_layout import (
    PROJECTIONS,
    ExpertSizes,
    expert_sizes,
    find_experts,
    stored_experts,
)

WEIGHT_STD = 0.02  # that of transformers


def random_mxfp4_model(config: Any, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model of that config with MXFP4 experts; its other weights are those of transformers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    random_mxfp4_experts(model, device)
    initialize_meta(model, device)
    return model


def random_mxfp4_experts(model: PreTrainedModel, device: str) -> None:
    """Replace the experts of the model, which may lie on the meta device, by random ones."""
    modules = find_experts(model)
    if not modules:
        raise UserError(
            f"experts of a {model.config.model_type} model cannot be mxfp4: use a GPT-OSS, or"
            " experts in bf16"
        )
    for name, module in modules.items():
        sizes = expert_sizes(module)
        dtype = module.gate_up_proj.dtype
        gate_up, down = (random_matrices(sizes, x, device, dtype) for x in PROJECTIONS)
        model.set_submodule(name, stored_experts(module, gate_up, down))


def random_matrices(
    sizes: ExpertSizes, projection: str, device: str, dtype: torch.dtype
) -> ExpertMatrices:
    """All codes are equally frequent; the bias, in `dtype`, is zero."""
    outputs, inputs = sizes.matrix(projection)
    rows = (sizes.num_experts, outputs)
    codes = torch.randint(0, 256, (*rows, inputs // 2), dtype=torch.uint8, device=device)
    scales = random_scales((*rows, inputs // MXFP4_BLOCK), device)
    return ExpertMatrices(codes, scales, torch.zeros(rows, dtype=dtype, device=device))


def random_scales(shape: tuple[int, ...], device: str) -> Tensor:
    """Two neighboring exponents, so frequent that the weights have the standard deviation.

    With exponent e, the variance is v * 4 ** e, where v is the mean square of the codes' values:
    share * v * 4 ** (low + 1) + (1 - share) * v * 4 ** low = WEIGHT_STD ** 2.
    """
    mean_square = sum(x * x for x in MXFP4_VALUES) / len(MXFP4_VALUES)
    ratio = WEIGHT_STD**2 / mean_square
    low = math.floor(math.log(ratio, 4))
    share = (ratio / 4**low - 1) / 3  # of the exponent low + 1
    is_high = torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(share)
    return is_high.to(torch.uint8) + (low + MXFP4_BIAS)


@torch.no_grad()
def initialize_meta(model: Any, device: str) -> None:
    """Give modules on the meta device memory and the initial weights of transformers."""
    for module in model.modules():
        parameters = {x: p for x, p in module.named_parameters(recurse=False) if p.is_meta}
        buffers = {x: b for x, b in module.named_buffers(recurse=False) if b.is_meta}
        for name, parameter in parameters.items():
            empty = torch.empty_like(parameter, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=False))
        for name, buffer in buffers.items():
            module._buffers[name] = torch.empty_like(buffer, device=device)
        if parameters or buffers:
            model._init_weights(module)
    if model.config.tie_word_embeddings:
        model.tie_weights()
