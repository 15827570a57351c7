"""DraftPolicy: what decides the shape of the next draft; FixedPolicy: always the same shape."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from peagle.draft_shape import DraftShape
from peagle.engine.policy.accepted import AcceptedCounts


@dataclass(frozen=True, slots=True)
class DraftChoice:
    shape: DraftShape
    reason: str  # for people: shown in the engine's status


class DraftPolicy(Protocol):
    def choose(
        self,
        batch: int,
        draft_confidence: Sequence[float] | None = None,
        chains_only: bool = False,
        timed: bool = True,
    ) -> DraftChoice:
        """Choose the shape to verify in the next step of `batch` requests.

        `draft_confidence`: see `YieldModel.expected_tokens`. `timed`: whether `observe` will get
        the duration of this step.
        """
        ...

    def observe(
        self,
        batch: int,
        shape: DraftShape,
        seconds: float | None,
        accepted: Sequence[AcceptedCounts],
    ) -> None:
        """Learn from a decode step that verified this shape; `accepted` has one entry per request.

        `seconds` is None if the duration belongs to no shape: the step also ran a prefill, or it
        drafted another shape for the next step than it verified.
        """
        ...


class FixedPolicy:
    def __init__(self, shape: DraftShape) -> None:
        self.shape = shape

    def choose(
        self,
        batch: int,
        draft_confidence: Sequence[float] | None = None,
        chains_only: bool = False,
        timed: bool = True,
    ) -> DraftChoice:
        shape = DraftShape(self.shape.k, self.shape.k) if chains_only else self.shape
        return DraftChoice(shape, "fixed")

    def observe(
        self,
        batch: int,
        shape: DraftShape,
        seconds: float | None,
        accepted: Sequence[AcceptedCounts],
    ) -> None:
        pass
