"""While the C kernels use their own threads, PyTorch computes with one thread."""

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


def test_pytorch_uses_one_thread_within_the_context() -> None:
    with threads_for_kernels():
        assert torch.get_num_threads() == 1 and kernel_threads() == 3
    assert torch.get_num_threads() == 3 and kernel_threads() == 3


def test_the_number_of_threads_is_restored_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), threads_for_kernels():
        raise ValueError("inside")
    assert torch.get_num_threads() == 3 and kernel_threads() == 3


def test_nothing_changes_if_disabled() -> None:
    with threads_for_kernels(enabled=False):
        assert torch.get_num_threads() == 3


def test_other_threads_are_not_affected() -> None:
    counts: list[int] = []
    with threads_for_kernels():
        torch.set_num_threads(2)
        thread = threading.Thread(target=lambda: counts.append(kernel_threads()))
        thread.start()
        thread.join()
    assert counts == [2]
