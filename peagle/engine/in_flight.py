"""InFlightPass: a launched pass whose result is on its way to the host."""

from dataclasses import dataclass
from typing import Any

import torch

from peagle.draft_shape import NO_DRAFT, DraftShape
from peagle.engine.ngram.ngram_step import NgramStep
from peagle.engine.schedule.request import Request
from peagle.engine.step.step_output import StepOutput


@dataclass(slots=True)
class InFlightPass:
    requests: list[Request]
    output: StepOutput  # On the host after `wait`.
    shape: DraftShape = NO_DRAFT
    is_prefill: bool = False
    started: float = 0.0
    # Of a pass that ended at its launch, as on a CPU; None: known when it is read back.
    seconds: float | None = None
    # Whether its duration is that of a decode step that verified and drafted one shape only.
    timed: bool = False
    ngram: NgramStep | None = None  # On a CPU, where requests draft by prompt lookup.
    event: Any = None  # Recorded behind the copy to the host; None on a CPU.

    def start_copy(self) -> None:
        """Begin to copy the result to the host, behind the work of the pass."""
        on_gpu = self.output.packed.is_cuda
        self.output.start_copy_to_host()
        if on_gpu:
            self.event = torch.cuda.Event()
            self.event.record()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()
