"""What a pass says."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.engine.sampling.sampler import Logprobs


class AcceptOutput(NamedTuple):
    """The second half of a step: what was accepted."""

    packed: Tensor  # [B, K + 3 or 5], see Result
    rows: Tensor | None  # [B * (K + 1)] of a tree: the accepted path among all rows
    draft_confidence: (
        Tensor | None
    )  # [B, K] how likely the new chains' drafts are; on a CPU, of calibrated drafters


@dataclass(slots=True)
class StepOutput:
    """On the device: [B, K + 3], the target's tokens, how many drafts were kept, and whether logits are broken; of a
    tree two more (kernels/walk.py).

    The first kept + 1 tokens are new.
    """

    packed: Tensor
    logprobs: Logprobs | None = None
    draft_confidence: Tensor | None = None  # see AcceptOutput
    verify_seconds: float | None = None  # on a CPU, where a step has finished when it returns
    draft_seconds: float | None = None  # likewise: acceptance and drafting


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One decode step as a benchmark sees it."""

    batch: int
    shape: DraftShape
    seconds: float
    verify_seconds: float | None  # None on a GPU, where steps run as CUDA graphs
    draft_seconds: float | None
