"""Beside the C kernels, which have threads of their own, PyTorch computes on one thread."""

import threading
from collections.abc import Iterator

import pytest
import torch

from peagle.kernels.cpu.threads import kernel_threads, threads_for_kernels


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_the_threads_belong_to_the_kernels() -> None:
    with threads_for_kernels():
        assert torch.get_num_threads() == 1 and kernel_threads() == 3
    assert torch.get_num_threads() == 3 and kernel_threads() == 3


def test_they_come_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), threads_for_kernels():
        raise ValueError("inside")
    assert torch.get_num_threads() == 3 and kernel_threads() == 3


def test_nothing_changes_if_pytorch_computes() -> None:
    with threads_for_kernels(enabled=False):
        assert torch.get_num_threads() == 3


def test_other_threads_do_not_see_it() -> None:
    counts: list[int] = []
    with threads_for_kernels():
        torch.set_num_threads(2)
        thread = threading.Thread(target=lambda: counts.append(kernel_threads()))
        thread.start()
        thread.join()
    assert counts == [2]
