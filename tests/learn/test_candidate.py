"""Candidates: small changes of weights survive rounding to 8 bits in the engine."""

import torch

from peagle.learn.training.candidate import MAX_CODE, dither_rows


def on_grid(rows: int, columns: int, step: float) -> torch.Tensor:
    codes = torch.randint(-100, 101, (rows, columns), generator=torch.Generator().manual_seed(1))
    codes[:, 0] = MAX_CODE
    return codes.float() * step


def nearest(matrix: torch.Tensor) -> torch.Tensor:
    step = matrix.abs().amax(1, keepdim=True) / MAX_CODE
    return (matrix / step).round() * step


def test_weights_on_the_8_bit_grid_are_unchanged() -> None:
    matrix = on_grid(8, 512, 0.01)
    torch.testing.assert_close(dither_rows(matrix), matrix)
    assert dither_rows(torch.zeros(2, 4)).equal(torch.zeros(2, 4))


def test_small_changes_survive_rounding_to_8_bits() -> None:
    matrix = on_grid(8, 4096, 0.01)
    changed = matrix.clone()
    changed[:, 1:] += 0.002  # a fifth of a step
    assert (nearest(changed) - matrix).abs().max() < 1e-6, "plain rounding would remove the change"
    rounded = dither_rows(changed)
    torch.testing.assert_close(nearest(rounded.bfloat16().float()), rounded, atol=1e-4, rtol=1e-2)
    mean = (rounded - matrix)[:, 1:].mean().item()
    assert abs(mean - 0.002) < 0.0002
