"""Products of many rows by the vendor's library, where it gives the bits of gemm.py.

The library is faster for hundreds of rows, but its kernels depend on the number of rows, and some
divide the inputs of an output. Every kernel that does not is a chain as in gemm.py. `prove`
compares the results for many numbers of rows, and only those with equal bits are left to the
library. A product of other sizes is divided, because rows are independent:

    proven 512, 1024; 1800 rows  ->  1024 and 512 by the library, 264 by gemm.py

A matrix that split_k.py splits is a batch of S products with results in float32: its partial sums.
"""

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from peagle.kernels.triton.batch_invariant.gemm import gated_invariant_gemm, invariant_gemm
from peagle.kernels.triton.batch_invariant.split_k import num_splits
from peagle.kernels.triton.launch.compile_ahead import compile_ahead
from peagle.kernels.triton.swiglu import swiglu

log = logging.getLogger(__name__)
# Numbers of rows that are tried; with fewer, gemm.py is as fast.
ROW_COUNTS = (*range(128, 1024, 32), *range(1024, 4097, 256))
MAX_OUTPUTS = 1 << 27  # of a trial: bounds its memory


class VendorRows:
    """The numbers of rows, by the shape of the matrix, for which the library is a chain."""

    def __init__(self) -> None:
        self._proven: dict[tuple[int, int, bool], list[int]] = {}

    @torch.inference_mode()
    def prove(
        self, weights: Sequence[tuple[Tensor, bool]], row_counts: Iterable[int] = ROW_COUNTS
    ) -> None:
        """Compare both kernels on random rows, for matrices that are gated or not."""
        by_shape = {(*weight.shape, gated): weight for weight, gated in weights}
        if not by_shape:
            return
        counts = sorted(row_counts, reverse=True)
        device = next(iter(by_shape.values())).device
        compile_ahead(lambda: self.launch_trials(weights, counts[0]), device)
        for (n, k, gated), weight in by_shape.items():
            x, expected = self._trial(weight, gated, counts[0])
            self._proven[n, k, gated] = [
                count
                for count in counts
                if count <= len(x)
                and has_equal_bits(x[:count], weight, gated, expected[..., :count, :])
            ]

    def launch_trials(self, weights: Sequence[tuple[Tensor, bool]], max_rows: int) -> None:
        """Launch the kernels of gemm.py that `prove` launches."""
        for weight, gated in {(*x.shape, gated): (x, gated) for x, gated in weights}.values():
            self._trial(weight, gated, max_rows)

    def _trial(self, weight: Tensor, gated: bool, max_rows: int) -> tuple[Tensor, Tensor]:
        """Random rows, and their product by gemm.py, split as by the library."""
        n, k = weight.shape
        rows = max(min(max_rows, MAX_OUTPUTS // (n * num_splits(weight))), 1)
        generator = torch.Generator(weight.device).manual_seed(0)
        x = torch.randn(rows, k, generator=generator, device=weight.device).to(weight.dtype)
        return x, own_product(x, weight, gated)

    def next_rows(self, weight: Tensor, rows: int, gated: bool) -> int:
        """The largest proven number of rows that does not exceed `rows`; 0: there is none."""
        proven = self._proven.get((*weight.shape, gated), ())
        return next((count for count in proven if count <= rows), 0)

    def multiply(self, x: Tensor, weight: Tensor, gated: bool) -> Tensor | None:
        """The product [T, N], partial sums [S, T, N], or gated [T, N / 2].

        None: nothing of it is left to the library.
        """
        count = self.next_rows(weight, len(x), gated)
        if not count:
            return None
        if count == len(x):
            return vendor_product(x, weight, gated)
        parts = []
        while count:
            parts.append(vendor_product(x[:count], weight, gated))
            x = x[count:]
            count = self.next_rows(weight, len(x), gated)
        if len(x):
            parts.append(own_product(x, weight, gated))
        return torch.cat(parts, -2)


def has_equal_bits(x: Tensor, weight: Tensor, gated: bool, expected: Tensor) -> bool:
    """Also False where the library does not support the product."""
    try:
        return torch.equal(vendor_product(x, weight, gated), expected)
    except RuntimeError:
        log.debug("the library does not multiply %s rows", len(x), exc_info=True)
        return False


def own_product(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    """By gemm.py, as partial sums where the matrix is split."""
    if gated:
        return gated_invariant_gemm(x, weight)
    return invariant_gemm(x, weight, parallel=True)


def vendor_product(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    if gated:
        return swiglu(linear(x, weight))
    splits = num_splits(weight)
    return linear(x, weight) if splits == 1 else split_product(x, weight, splits)


def split_product(x: Tensor, weight: Tensor, splits: int) -> Tensor:
    """Partial sums [S, T, N] in float32: one product for each range of inputs, in one launch."""
    ranges = (splits, weight.shape[1] // splits)
    x_parts = x.unflatten(1, ranges).transpose(0, 1)  # [S, T, K / S]
    weight_parts = weight.unflatten(1, ranges).permute(1, 2, 0)  # [S, K / S, N]
    return torch.bmm(x_parts, weight_parts, out_dtype=torch.float32)
