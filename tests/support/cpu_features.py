"""Marks for tests that need the C kernels, or a CPU with dot products of bf16 and int8."""

import pytest
import torch

from peagle.kernels.cpu.library import library
from peagle.kernels.cpu.matrix import can_pack

needs_c = pytest.mark.skipif(library() is None, reason="no C compiler")
needs_dots = pytest.mark.skipif(
    not can_pack(torch.zeros(2, 2, dtype=torch.bfloat16)),
    reason="no dot products of bf16 on this CPU",
)
