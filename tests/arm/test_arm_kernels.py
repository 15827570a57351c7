"""The tests of the C kernels, on ARM under qemu (`make test-arm`).

To add tests, import them here: the fixture `cpu_level` makes them run on ARM.
"""

import ctypes

import pytest
import torch

from peagle.kernels.cpu.library import library
from tests.kernels.cpu.test_cpu_kernels import (
    test_against_the_reference,
    test_argmax,
    test_attention,
    test_attention_does_not_depend_on_neighbors,
    test_nan_stays_nan,
)
from tests.support.kernels.arm_library import ArmLibrary

__all__ = [
    "test_against_the_reference",
    "test_argmax",
    "test_attention",
    "test_attention_does_not_depend_on_neighbors",
    "test_nan_stays_nan",
]
pytestmark = pytest.mark.arm
FEATURES = {
    "armv8": ("f16c",),
    "armv8.2-dotprod": ("dotprod", "f16c"),
    "armv8.6-bf16": ("bf16", "dotprod", "f16c"),
}


def test_the_library_reports_its_instruction_set(cpu_level: str) -> None:
    loaded = library()
    assert loaded is not None
    assert (loaded.instruction_set, loaded.vector_bits) == ("neon", 128)
    assert loaded.features == FEATURES[cpu_level]


def test_half_precision(emulated: ArmLibrary) -> None:
    codes = torch.arange(1 << 16).to(torch.int32).to(torch.uint16)
    wide = torch.empty(1 << 16)
    emulated.widen.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
    emulated.widen(codes.data_ptr(), wide.data_ptr(), len(codes))
    torch.testing.assert_close(
        wide, codes.view(torch.float16).float(), rtol=0, atol=0, equal_nan=True
    )
