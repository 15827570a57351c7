"""Rounding to MXFP4: blocks of 32 inputs as floats of 4 bits with the exponent of a power of 2.

Codes and magnitudes are piecewise linear functions of each other:

    code       0 1   2 3   4 5 6 7     min(2 x, x + 2, x / 2 + 4) of a magnitude x
    magnitude  0 0.5 1 1.5 2 3 4 6     max(c / 2, c - 2, 2 c - 8) of a code c

Rounding the first gives the code of the nearest magnitude, and the even code between two.
"""

import torch
from torch import Tensor

from peagle.kernels.expert_matrices import MXFP4_BIAS, MXFP4_BLOCK

LARGEST_CODE = 7  # without the sign
LARGEST_EXPONENT = 2  # of a code: 4 = 2 ** 2 and 6 = 1.5 * 2 ** 2
SIGN = 8  # the bit of a code
ROWS_AT_ONCE = 128  # The memory of temporary tensors stays in the caches of a CPU.


def quantize_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [.., N, K] -> codes [.., N, K / 2] and scales [.., N, K / 32], both uint8.

    The exponent of a block is that of the OCP MX specification, floor(log2(largest)) - 2: the
    largest magnitude becomes 4 to 8, and 6 if it is above that. The next exponent is tried, too,
    and taken where the block's squared error is smaller, as it often is if the largest magnitude
    becomes more than 7. On normal weights this reduces the error from 11.4 % to 11.1 %.
    """
    rows = weight.flatten(0, -2)  # [.., K]
    parts = [quantize_rows(part) for part in rows.split(ROWS_AT_ONCE)]
    codes, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return codes.unflatten(0, weight.shape[:-1]), scales.unflatten(0, weight.shape[:-1])


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows [T, K] -> codes [T, K / 2] and scales [T, K / 32]"""
    blocks = rows.float().contiguous().unflatten(-1, (-1, MXFP4_BLOCK))  # [T, K / 32, 32]
    magnitudes = blocks.abs()
    exponents = torch.frexp(magnitudes.amax(-1, keepdim=True)).exponent - 1 - LARGEST_EXPONENT
    # A scale of 255 is not a number.
    first, next_ = (x.clamp(-MXFP4_BIAS, MXFP4_BIAS) for x in (exponents, exponents + 1))
    is_better = squared_errors(magnitudes, next_) < squared_errors(magnitudes, first)
    exponents = torch.where(is_better, next_, first)
    codes = nearest_codes(magnitudes, exponents).to(torch.uint8)
    codes = (codes + SIGN * (blocks < 0).to(torch.uint8)).flatten(-2)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return packed, (exponents + MXFP4_BIAS).to(torch.uint8).squeeze(-1)


def nearest_codes(magnitudes: Tensor, exponents: Tensor) -> Tensor:
    """magnitudes [.., 32] with exponents [.., 1] -> codes [.., 32] without signs, as floats"""
    x = torch.ldexp(magnitudes, -exponents)
    codes = torch.minimum(torch.minimum(2 * x, x + 2), x / 2 + 4)
    return codes.round_().clamp_(max=LARGEST_CODE)


def squared_errors(magnitudes: Tensor, exponents: Tensor) -> Tensor:
    """[.., 1] The sum over a block, with these exponents."""
    codes = nearest_codes(magnitudes, exponents)
    rounded = torch.maximum(torch.maximum(codes / 2, codes - 2), 2 * codes - 8)
    return (torch.ldexp(rounded, exponents) - magnitudes).square_().sum(-1, keepdim=True)
