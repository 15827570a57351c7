"""The tensors of MXFP4 experts in a checkpoint, with the names and shapes of GPT-OSS as published.

Of each layer's module X = `model.layers.N.mlp.experts`, for E experts that are I wide:

    X.gate_up_proj_blocks [E, 2I, d / 32, 16] uint8   X.gate_up_proj_scales [E, 2I, d / 32] uint8
    X.down_proj_blocks    [E, d, I / 32, 16]  uint8   X.down_proj_scales    [E, d, I / 32]  uint8
    X.gate_up_proj_bias   [E, 2I]                     X.down_proj_bias      [E, d]

Gate and up are interleaved. The 16 bytes of a block are the codes of 32 inputs, that of the first
input in the low bits: ExpertMatrices without a copy.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from peagle.errors import UserError
from peagle.kernels.expert_matrices import MXFP4_BLOCK, ExpertMatrices, GatedActivation
from peagle.target.experts.stored_experts import StoredExperts

MXFP4 = "mxfp4"  # quant_method in config.json
PROJECTIONS = ("gate_up_proj", "down_proj")
BLOCKS = "_blocks"
SCALES = "_scales"
BIAS = "_bias"
NOT_A_NUMBER = 255  # as a scale
DOWNLOAD_AGAIN = "download the target again, or write it with `peagle quantize --format mxfp4`"
# Modules that stay in bfloat16, in the terms of transformers.
NOT_CONVERTED = (
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
)


def quantization_config() -> dict[str, Any]:
    """`quantization_config` of config.json."""
    return {"modules_to_not_convert": list(NOT_CONVERTED), "quant_method": MXFP4}


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The sizes of the experts of one layer."""

    num_experts: int
    hidden_size: int
    intermediate_size: int

    def matrix(self, projection: str) -> tuple[int, int]:
        """Outputs and inputs of a projection."""
        if projection == "gate_up_proj":
            return 2 * self.intermediate_size, self.hidden_size
        return self.hidden_size, self.intermediate_size


def find_experts(model: PreTrainedModel) -> dict[str, GptOssExperts]:
    """The modules whose experts this layout describes, by name; none for other architectures."""
    return {name: x for name, x in model.named_modules() if isinstance(x, GptOssExperts)}


def expert_sizes(experts: GptOssExperts) -> ExpertSizes:
    """Raises an error if blocks do not fit the sizes."""
    sizes = ExpertSizes(experts.num_experts, experts.hidden_size, experts.intermediate_size)
    if sizes.hidden_size % MXFP4_BLOCK or sizes.intermediate_size % MXFP4_BLOCK:
        raise UserError(
            f"mxfp4 needs multiples of {MXFP4_BLOCK}, but the hidden size is {sizes.hidden_size}"
            f" and experts are {sizes.intermediate_size} wide: use fp8 or int8"
        )
    return sizes


def stored_experts(
    experts: GptOssExperts, gate_up: ExpertMatrices, down: ExpertMatrices
) -> StoredExperts:
    """What takes the place of `experts`, with its activation; on a GPU as its kernels read it."""
    if gate_up.weight.is_cuda:
        dtype = experts.gate_up_proj.dtype
        gate_up, down = gate_up.for_gpu(dtype), down.for_gpu(dtype)
    activation = GatedActivation(
        interleaved=True, alpha=experts.alpha, limit=experts.limit, up_shift=1.0
    )
    return StoredExperts(gate_up, down, activation)


def expert_tensors(name: str, projection: str, codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """The tensors of a projection of module `name`: codes [E, N, K / 2], scales [E, N, K / 32]."""
    blocks = codes.unflatten(-1, (-1, MXFP4_BLOCK // 2))
    return {f"{name}.{projection}{BLOCKS}": blocks, f"{name}.{projection}{SCALES}": scales}


def read_matrices(
    tensors: dict[str, Tensor], name: str, projection: str, sizes: ExpertSizes, dtype: torch.dtype
) -> ExpertMatrices:
    """A projection of module `name`, with its bias in `dtype`. Takes it from `tensors`."""
    count = sizes.num_experts
    outputs, inputs = sizes.matrix(projection)
    groups = inputs // MXFP4_BLOCK
    prefix = f"{name}.{projection}"
    blocks = _take(tensors, prefix + BLOCKS, (count, outputs, groups, MXFP4_BLOCK // 2))
    scales = _take(tensors, prefix + SCALES, (count, outputs, groups))
    bias = _take(tensors, prefix + BIAS, (count, outputs))
    for suffix, tensor in ((BLOCKS, blocks), (SCALES, scales)):
        if tensor.dtype != torch.uint8:
            raise UserError(
                f"tensor {prefix}{suffix} is {tensor.dtype}, not uint8: {DOWNLOAD_AGAIN}"
            )
    if not bias.is_floating_point():
        raise UserError(f"tensor {prefix}{BIAS} is {bias.dtype}, not a float: {DOWNLOAD_AGAIN}")
    if (scales == NOT_A_NUMBER).any():
        raise UserError(
            f"tensor {prefix}{SCALES} has scales that are not numbers: {DOWNLOAD_AGAIN}"
        )
    return ExpertMatrices(blocks.flatten(-2), scales, bias.to(dtype))


def _take(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in tensors:
        raise UserError(f"tensor {name} is missing: {DOWNLOAD_AGAIN}")
    tensor = tensors.pop(name)
    if tuple(tensor.shape) != shape:
        raise UserError(
            f"tensor {name} has shape {list(tensor.shape)}, but the config needs {list(shape)}:"
            f" {DOWNLOAD_AGAIN}"
        )
    return tensor
