"""The result of a pass: on the device, on the host, and as benchmarks see it.

A pass packs its result into one integer tensor, so that one transfer brings it to the host. The
columns of a row, which is one request:

    0 .. K      the target's tokens: the accepted drafts, then the bonus token, then unused ones
    K + 1       the number of accepted drafts
    K + 2       1 if a logit of the request is not finite
    K + 3, 4    of a tree: accepted drafts of the chain, and the bits of the accepted path
                (kernels/triton/accept_tree.py)
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.engine.policy.accepted import AcceptedCounts, accepted_counts
from peagle.engine.sampling.sampler import Logprobs


class AcceptOutput(NamedTuple):
    """The second half of a step: acceptance and drafting, on the device."""

    packed: Tensor  # [B, K + 3], of a tree [B, K + 5]
    path_rows: Tensor | None  # [B * (K + 1)] of a tree: the accepted path among all rows
    # [B, K] acceptance probability of each new draft; on a CPU, of calibrated drafters.
    draft_confidence: Tensor | None


class AcceptedBatch(NamedTuple):
    """The result of a pass on the host, by request."""

    tokens: list[list[int]]  # The accepted drafts and the bonus token.
    accepted: list[int]
    broken: list[int]  # 1: a logit is not finite.
    counts: list[AcceptedCounts]


@dataclass(slots=True)
class StepOutput:
    packed: Tensor
    k: int
    logprobs: Logprobs | None = None
    draft_confidence: Tensor | None = None  # See AcceptOutput.
    verify_seconds: float | None = None  # On a CPU, where a step has finished when it returns.
    draft_seconds: float | None = None  # Likewise, of acceptance and drafting.

    @property
    def tokens(self) -> Tensor:
        """[B, K + 1]; the first `accepted + 1` of each row are new."""
        return self.packed[:, : self.k + 1]

    @property
    def accepted(self) -> Tensor:
        """[B]"""
        return self.packed[:, self.k + 1]

    def start_copy_to_host(self) -> None:
        """Replace device tensors by host copies, valid once the current stream is synchronized."""
        if not self.packed.is_cuda:
            return
        pinned = torch.empty(self.packed.shape, dtype=self.packed.dtype, pin_memory=True)
        self.packed = pinned.copy_(self.packed, non_blocking=True)
        if self.logprobs is not None:
            self.logprobs = Logprobs(*(x.to("cpu", non_blocking=True) for x in self.logprobs))

    def unpack(self) -> AcceptedBatch:
        """Split the columns; on the host."""
        column = self.k + 1
        rows = self.packed.tolist()
        return AcceptedBatch(
            tokens=[row[: row[column] + 1] for row in rows],
            accepted=[row[column] for row in rows],
            broken=[row[column + 1] for row in rows],
            counts=[accepted_counts(row[column], row[column + 2 :]) for row in rows],
        )


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One decode step as a benchmark sees it."""

    batch: int
    shape: DraftShape
    seconds: float
    verify_seconds: float | None  # None on a GPU, where steps run as CUDA graphs.
    draft_seconds: float | None
