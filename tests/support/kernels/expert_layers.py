"""Random experts of a layer, in every format."""

import torch
from torch import Tensor

from peagle.kernels.cpu.matrix import Mxfp4Matrix, quantize_int8
from peagle.kernels.expert_matrices import ExpertMatrices
from tests.support.kernels.comparing import some

EXPERT_FORMATS = ("float", "int8", "fp8", "mxfp4")


def some_mxfp4(outputs: int, inputs: int, seed: int = 0) -> Mxfp4Matrix:
    """Weights of about 1 / sqrt(inputs): 3 is the mean size of a value."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (outputs, inputs // 2), generator=generator).byte()
    exponents = torch.randint(-2, 2, (outputs, inputs // 32), generator=generator)
    middle = 127 - round(torch.tensor(3 * inputs**0.5).log2().item())
    return Mxfp4Matrix(codes, (middle + exponents).byte())


def some_expert_matrices(
    format: str, experts: int, outputs: int, inputs: int, bias: bool = False, seed: int = 0
) -> ExpertMatrices:
    """Floats are those of bf16, in float32."""
    biases = some(experts, outputs, seed=seed + 1).bfloat16().float() if bias else None
    if format == "mxfp4":
        parts = [some_mxfp4(outputs, inputs, seed + expert) for expert in range(experts)]
        codes, scales = (torch.stack(list(x)) for x in zip(*map(fields, parts), strict=True))
        return ExpertMatrices(codes, scales, biases)
    weight = (some(experts, outputs, inputs, seed=seed) / inputs**0.5).bfloat16()
    if format == "float":
        return ExpertMatrices(weight.float(), None, biases)
    if format == "int8":
        quantized = [quantize_int8(expert) for expert in weight]
        codes, scales = (torch.stack(list(x)) for x in zip(*map(fields, quantized), strict=True))
        return ExpertMatrices(codes, scales, biases)
    scales = weight.float().abs().amax(2) / 448
    return ExpertMatrices(
        (weight.float() / scales[:, :, None]).to(torch.float8_e4m3fn), scales, biases
    )


def fields(matrix: object) -> tuple[Tensor, Tensor]:
    return matrix.codes, matrix.scales  # type: ignore[attr-defined]
