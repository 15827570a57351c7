"""Softmax over the vocabulary, with bits that depend on a row alone.

PyTorch's softmax sums a row in an order that follows from the length of the row. On a GPU it reads
16 bytes at once, beginning where a row is aligned to them. With an odd vocabulary the order would
also depend on the address of the row, so rows are padded:

    V = 50,257  ->  rows of 50,260 logits, the last three -inf

`torch.logsumexp` divides a row among more threads the fewer rows there are. It is not used here.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

ALIGNMENT = 4  # float32 numbers in 16 bytes


def softmax(logits: Tensor) -> Tensor:
    """[..., V] float32, contiguous -> probabilities [..., V], whose rows may lie apart."""
    return aligned(logits).softmax(-1)[..., : logits.shape[-1]]


def log_softmax(logits: Tensor) -> Tensor:
    """[..., V] float32, contiguous -> log-probabilities [..., V]."""
    return aligned(logits).log_softmax(-1)[..., : logits.shape[-1]]


def aligned(logits: Tensor) -> Tensor:
    """The logits, with padded rows if some would begin between multiples of 16 bytes on a GPU."""
    missing = -logits.shape[-1] % ALIGNMENT
    if not missing or not logits.is_cuda:
        return logits
    return pad(logits, (0, missing), value=-torch.inf)
