"""The teacher of a row: the target's last hidden state, or its captured most likely tokens."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class KnownTokens(NamedTuple):
    """The captured tokens of each row that lie in the draft vocabulary."""

    mask: Tensor  # [R, k] bool
    ids: Tensor  # [R, k] in the draft vocabulary; 0 where the mask is False
    best: Tensor  # [R, 1] the most likely of them


@dataclass(frozen=True, slots=True)
class TopKLogits:
    """The teacher's most likely tokens at each row, in falling order."""

    logits: Tensor  # [R, k], up to a constant for each row
    ids: Tensor  # [R, k] in the draft vocabulary; -1 is outside

    def __getitem__(self, rows: Tensor | slice) -> "TopKLogits":
        return TopKLogits(self.logits[rows], self.ids[rows])

    @property
    def device(self) -> torch.device:
        return self.logits.device

    def known(self) -> KnownTokens:
        mask = self.ids >= 0
        ids = self.ids.clamp(min=0).long()
        # The first one is the most likely, even where rounding made it a tie.
        first = mask.int().argmax(-1, keepdim=True)
        return KnownTokens(mask, ids, ids.gather(-1, first))


Teacher = Tensor | TopKLogits  # last hidden states [R, d], or what a capture kept


class PackFeatures(NamedTuple):
    """What the drafter of a pack of T tokens learns from; rows of padding hold any values."""

    taps: Tensor  # [T, taps * d]: g, the target's residual streams
    teacher: Teacher  # of T rows


def soft_cap(logits: Tensor, softcap: float) -> Tensor:
    """Apply Gemma's soft-capping of the target's logits; 0 leaves them as they are."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """Append rows of zeros up to `rows`."""
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])]) if rows > len(x) else x


def pad_teacher(teacher: Teacher, rows: int) -> Teacher:
    if isinstance(teacher, TopKLogits):
        return TopKLogits(pad_rows(teacher.logits, rows), pad_rows(teacher.ids, rows))
    return pad_rows(teacher, rows)
