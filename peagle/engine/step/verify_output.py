"""VerifyOutput: the result of the target's pass over a batch of drafts, on the device."""

from dataclasses import dataclass

from torch import Tensor

from peagle.kernels.row_pass import RowPass


@dataclass(slots=True)
class VerifyOutput:
    """The first half of a step: the rows that the target has consumed, and what it predicts."""

    rows: RowPass
    ids: Tensor  # [B, R]
    hidden: Tensor  # [B * R, taps * d]
    logits: Tensor  # [B, R, vocabulary]
    tokens: Tensor  # [B, R] the argmax, until sampled tokens overwrite it
    top_logits: Tensor  # [B, R] the logit of the argmax
    ends: Tensor  # [B]


def path_logits(logits: Tensor, path_rows: Tensor | None) -> Tensor:
    """The logits [B, R, V] of a chain, or [B, K + 1, V] of the accepted path of a tree."""
    if path_rows is None:
        return logits
    return logits.flatten(0, 1)[path_rows].unflatten(0, (len(logits), -1))
