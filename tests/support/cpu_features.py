"""Marks for tests that need instructions which not every CPU has."""

import pytest
import torch

from peagle.kernels.cpu.matrix import can_pack

needs_dots = pytest.mark.skipif(
    not can_pack(torch.zeros(2, 2, dtype=torch.bfloat16)),
    reason="no dot products of bf16 on this CPU",
)
