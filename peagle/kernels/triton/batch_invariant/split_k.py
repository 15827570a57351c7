"""Split-K in a fixed order: which matrices are split, and how their partial sums are added.

With few rows, a matrix with few outputs has too few programs to keep a GPU busy. Its inputs are
divided into S ranges of equal length. Each range is one chain of products (gemm.py), and the S sums
are added in their order, in float32:

    weight [4096, 14336], S = 2    (inputs 0 .. 7167) + (inputs 7168 .. 14335), then rounded

S follows from the matrix alone, so that a row has the same bits in any batch. It is the smallest
that gives BUSY_PROGRAMS programs of 64 outputs each, with at least 512 inputs
(skinny_gemm.num_splits):

    outputs  inputs    programs    S
       6144    4096          96    2    2 x 96
       4096    4096          64    2    2 x 64 are enough
       4096   14336          64    2
        576     576           9    1    too few inputs
        576    1536           9    3    too few programs, but at most 1536 / 512 ranges

The fast path wants more programs. More splits than needed cost time with many rows, where the
partial sums are read and written once more. Weights in 8 bits are not split.
"""

import torch
from torch import Tensor

from peagle.kernels.triton import skinny_gemm

BUSY_PROGRAMS = 128  # programs that keep a GPU busy


def num_splits(weight: Tensor) -> int:
    """The number of ranges of inputs; 1: the matrix is not split."""
    return 1 if weight.element_size() == 1 else skinny_gemm.num_splits(weight, BUSY_PROGRAMS)


def add_splits(product: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, N] of a product, or of partial sums [S, T, N], which are added in their order."""
    if product.dim() == 2:
        return product
    total = product[0]
    for part in product[1:]:
        total = total + part
    return total.to(dtype)
