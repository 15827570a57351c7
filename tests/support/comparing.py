"""Numbers for kernels to work on, and how near two results are."""

import torch
from torch import Tensor


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def near(found: Tensor, wanted: Tensor, steps: float = 1.0) -> None:
    """Within `steps` roundings of the dtype."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    unit = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[found.dtype] * steps
    torch.testing.assert_close(found.float(), wanted.float(), rtol=unit, atol=unit)
