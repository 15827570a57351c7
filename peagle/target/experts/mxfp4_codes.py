"""Rounding to MXFP4: blocks of 32 inputs as floats of 4 bits with the exponent of a power of 2."""

import torch
from torch import Tensor

from peagle.kernels.expert_matrices import MXFP4_BIAS, MXFP4_BLOCK, MXFP4_VALUES, decode_mxfp4

LARGEST_EXPONENT = 2  # of a code: 4 = 2 ** 2 and 6 = 1.5 * 2 ** 2
SIGN = 8  # the bit of a code


def quantize_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [.., N, K] -> codes [.., N, K / 2] and scales [.., N, K / 32], both uint8.

    The exponent of a block is that of the OCP MX specification, floor(log2(largest)) - 2: the
    largest magnitude becomes 4 to 8, and 6 if it is above that. The next exponent is tried, too,
    and taken where the block's squared error is smaller, as it often is if the largest magnitude
    becomes more than 7. On normal weights this reduces the error from 11.4 % to 11.1 %.
    """
    blocks = weight.float().contiguous().unflatten(-1, (-1, MXFP4_BLOCK))  # [.., N, K / 32, 32]
    exponents = torch.frexp(blocks.abs().amax(-1)).exponent - 1 - LARGEST_EXPONENT
    candidates = [encode_blocks(blocks, exponents + step) for step in (0, 1)]
    errors = [squared_errors(blocks, *candidate) for candidate in candidates]
    spec, coarser = candidates
    is_coarser = (errors[1] < errors[0])[..., None]
    codes, scales = (torch.where(is_coarser, y, x) for x, y in zip(spec, coarser, strict=True))
    return codes.flatten(-2), scales.squeeze(-1)


def encode_blocks(blocks: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """blocks [.., 32] with exponents [..] -> codes [.., 16] and scales [.., 1], both uint8"""
    exponents = exponents.clamp(-MXFP4_BIAS, MXFP4_BIAS)[..., None]  # 255 is not a number
    magnitudes = torch.ldexp(blocks.abs(), -exponents)
    codes = torch.bucketize(magnitudes, rounding_limits(blocks.device), out_int32=True)
    codes = (codes + SIGN * (blocks < 0)).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + MXFP4_BIAS).to(torch.uint8)


def rounding_limits(device: torch.device) -> Tensor:
    """[7] The largest magnitude that is rounded to each code but the last.

    Those are the means of neighbors, for which `bucketize` chooses the lower code. A mean becomes
    the even code: before an odd lower code, the limit is the next number below the mean.
    """
    values = torch.tensor(MXFP4_VALUES, device=device)
    means = (values[:-1] + values[1:]) / 2
    below = torch.nextafter(means, torch.zeros_like(means))
    is_odd = torch.arange(len(means), device=device) % 2 == 1
    return torch.where(is_odd, below, means)


def squared_errors(blocks: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The squared error of each block [.., 32] -> [..]"""
    return (decode_mxfp4(codes, scales, torch.float32) - blocks).square().sum(-1)
