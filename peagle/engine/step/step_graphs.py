"""StepGraphs: whether steps run as CUDA graphs, and when those are captured."""

import logging

import torch

from peagle.draft_shape import DraftShape
from peagle.engine.step.batch_sizes import batch_bucket
from peagle.engine.step.graph_backlog import GraphBacklog
from peagle.engine.step.stepper import Stepper

log = logging.getLogger(__name__)


class StepGraphs:
    """All methods are called between two steps, or by a step."""

    def __init__(self, stepper: Stepper, backlog: GraphBacklog, enabled: bool) -> None:
        self.stepper = stepper
        self.backlog = backlog
        self.enabled = enabled

    def disable(self) -> None:
        """Capture no more graphs; those that are captured stay in use."""
        self.enabled = False
        self.backlog.clear()

    def warm_up(self, max_batch: int, ready_batch: int | None) -> None:
        """Compile kernels, and capture graphs: see `Engine.warm_up`."""
        if self.enabled:
            self.backlog.fill(max_batch, ready_batch)
            self.backlog.run(ready_batch, self.capture)

    def capture_next(self) -> bool:
        """Capture one graph of the backlog. Returns False if there was nothing to do."""
        try:
            return self.backlog.run_next(self.capture)
        except torch.OutOfMemoryError:
            log.warning("no memory is left for the CUDA graphs of larger batches")
            self.backlog.clear()
            return False

    def prepare_step(
        self, count: int, verify_shape: DraftShape, draft_shape: DraftShape, largest: DraftShape
    ) -> DraftShape:
        """Capture the graphs of a step that has none. Returns the shape that it drafts.

        Warm-up captures steps of one shape, those that draft the largest, and some that draft the
        next larger one. Other steps draft the largest, so that the next step can verify any.
        """
        stepper = self.stepper
        if not self.enabled:
            return draft_shape
        if verify_shape != draft_shape and not stepper.is_captured(
            count, verify_shape, draft_shape
        ):
            draft_shape = largest
        if not stepper.is_captured(count, verify_shape, draft_shape):
            self._capture_for_step(batch_bucket(count), verify_shape, draft_shape)
        return draft_shape

    def is_padded(self, count: int, verify_shape: DraftShape, draft_shape: DraftShape) -> bool:
        """Whether a step runs with the graphs of a larger batch size than its own."""
        return self.enabled and not self.stepper.has_graph(
            batch_bucket(count), verify_shape, draft_shape
        )

    def _capture_for_step(
        self, batch: int, verify_shape: DraftShape, draft_shape: DraftShape
    ) -> None:
        """Without memory for its graphs, this step and later ones run without new graphs."""
        try:
            self.capture(batch, verify_shape, draft_shape)
        except torch.OutOfMemoryError:
            log.warning("no memory is left for CUDA graphs: some steps run slower without them")
            self.disable()

    def capture(self, batch: int, verify_shape: DraftShape, draft_shape: DraftShape) -> None:
        captured = self.stepper.has_graph(batch, verify_shape, draft_shape)
        if not captured and not self.stepper.capture(batch, verify_shape, draft_shape):
            self.disable()
