"""Split-K in a fixed order: which matrices are split, and how their partial sums are added.

With few rows, a matrix with few outputs has too few programs to keep a GPU busy. Its inputs are
divided into S ranges of equal length. Each range is one chain of products (gemm.py), and the S sums
are added in their order, in float32:

    weight [4096, 14336], S = 4    ((inputs 0 .. 3583) + (3584 .. 7167) + ...), then rounded

S follows from the matrix alone, so that a row has the same bits in any batch. It is that of the
fast path (skinny_gemm.num_splits): the smallest that keeps a GPU busy with programs of 64 outputs
each, with at least 512 inputs.

    outputs  inputs    programs    S
       6144    4096          96    2    2 x 96 are enough
       4096    4096          64    4    4 x 64: 3 does not divide the inputs
       4096   14336          64    4
        576     576           9    1    too few inputs
        576    1536           9    3    too few programs, but at most 1536 / 512 ranges

With hundreds of rows, where partial sums are read and written once more, fewer splits would take
less time; with one request and 8 rows, a layer of the 8B shape takes 3 % less time with S = 4 for
the three matrices than with 2. Weights in 8 bits are not split.
"""

import torch
from torch import Tensor

from peagle.kernels.triton import skinny_gemm


def num_splits(weight: Tensor) -> int:
    """The number of ranges of inputs; 1: the matrix is not split."""
    return 1 if weight.element_size() == 1 else skinny_gemm.num_splits(weight)


def add_splits(product: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, N] of a product, or of partial sums [S, T, N], which are added in their order."""
    if product.dim() == 2:
        return product
    total = product[0]
    for part in product[1:]:
        total = total + part
    return total.to(dtype)
