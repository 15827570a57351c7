"""Mixtures of experts on ARM under qemu (`make test-arm`)."""

import pytest

from tests.kernels.cpu.test_cpu_moe_layer import test_all_layers_in_one_call
from tests.kernels.cpu.test_packed_experts import (
    test_against_pytorch,
    test_equal_logits_choose_the_first_experts,
    test_mxfp4_equals_the_dequantized_matrices,
    test_router,
)

__all__ = [
    "test_against_pytorch",
    "test_all_layers_in_one_call",
    "test_equal_logits_choose_the_first_experts",
    "test_mxfp4_equals_the_dequantized_matrices",
    "test_router",
]
pytestmark = [pytest.mark.arm, pytest.mark.usefixtures("cpu_level")]
