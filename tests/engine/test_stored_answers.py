"""The real default pair, its weights as stored: neither drafts nor neighbors change a token."""

import pytest
import torch

from peagle.kernels.cpu.level import NATIVE, CpuLevel
from tests.support.cpu_features import LEVELS, needs_c
from tests.support.stored_answers import check_answers, check_in_process, stored_file

pytestmark = needs_c


@pytest.fixture(autouse=True)
def stored_weights() -> None:
    if not stored_file().is_file():
        pytest.skip("the GGUF file could not be fetched")


def check(level: CpuLevel, count: int, tokens: int, int8: bool = False) -> None:
    if level == NATIVE:
        check_answers(count, tokens, int8)
    else:
        check_in_process(level.name, count, tokens, int8)


def test_three_requests() -> None:
    """`test_64_requests` does the same at every level."""
    check(NATIVE, 3, 5)


def test_int8() -> None:
    """Rows are quantized one by one, so drafts change nothing there either."""
    check(NATIVE, 3, 5, int8=True)


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_64_requests(level: CpuLevel, int8: bool) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check(level, 64, 16, int8)
    finally:
        torch.set_num_threads(threads)
