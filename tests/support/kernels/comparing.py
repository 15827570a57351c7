"""Random inputs for kernels, and comparisons of results."""

import torch
from torch import Tensor


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def near(result: Tensor, expected: Tensor, steps: float = 1.0) -> None:
    """Assert that the results differ by at most `steps` roundings of their dtype."""
    assert result.dtype == expected.dtype and result.shape == expected.shape
    unit = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[result.dtype] * steps
    torch.testing.assert_close(result.float(), expected.float(), rtol=unit, atol=unit)


def same_fields(result: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    """Assert that two named tuples of tensors are equal, bit for bit."""
    names = getattr(expected, "_fields", range(len(expected)))
    for name, a, b in zip(names, result, expected, strict=True):
        if a is None or b is None:
            assert a is b, name
        else:
            assert a.dtype == b.dtype and torch.equal(a, b), name
