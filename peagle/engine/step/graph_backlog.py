"""GraphBacklog: the CUDA graphs that steps will need, the smallest batches first.

An engine is ready once the graphs of small batches are captured. The rest follows one by one when
no request is live; a step that needs its graph earlier captures it itself. Costs of adaptive
drafting are measured with the graphs of a batch size, and extrapolated for larger ones until then
(policy/step_costs.py).

    warm-up    kernels compiled by several threads; batches 1, 2, 4, 8: capture, measure
    idle       batch 16: capture ... measure; batch 24: ...
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from peagle.draft_shape import DraftShape
from peagle.engine.policy.adaptive import AdaptivePolicy
from peagle.engine.policy.draft_policy import DraftPolicy
from peagle.engine.schedule.prefill_layout import PrefillSize
from peagle.engine.step.batch_sizes import BATCH_BUCKETS
from peagle.engine.step.startup_times import StartupTimes
from peagle.engine.step.step_measurements import graph_costs
from peagle.engine.step.stepper import Stepper
from peagle.kernels.triton.launch.compile_ahead import compile_ahead

# Batches from which on steps that verify one shape and draft the next larger one have graphs too:
# drafting the largest shape for so many requests takes longer than the step itself.
MIN_NEIGHBOR_BATCH = 64
# Larger batches launch hardly any kernel that these do not launch.
COMPILED_BATCHES = (1, 2, 4, 8, 16, 32)
COMPILED_PREFILLS = (1, 8)  # requests

CaptureStep = Callable[[int, DraftShape, DraftShape], None]


@dataclass(frozen=True, slots=True)
class StepGraph:
    batch: int
    verify_shape: DraftShape
    draft_shape: DraftShape


@dataclass(frozen=True, slots=True)
class PrefillGraph:
    batch: int
    size: PrefillSize


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measure the steps of a batch size, whose graphs are captured."""

    batch: int


Work = StepGraph | PrefillGraph | Calibration


class GraphBacklog:
    def __init__(
        self,
        stepper: Stepper,
        policy: DraftPolicy,
        max_shape: DraftShape,
        drafter_shape: DraftShape,
        times: StartupTimes,
    ) -> None:
        self.stepper = stepper
        self.adaptive = policy if isinstance(policy, AdaptivePolicy) else None
        self.drafter_shape = drafter_shape
        self.times = times
        chain = DraftShape(max_shape.k, max_shape.k)  # For batches with a grammar.
        self.shapes: Collection[DraftShape] = {max_shape, chain}
        if self.adaptive is not None:
            self.shapes = self.adaptive.candidates
        self._pending: deque[Work] = deque()
        self._ready = 0  # The first ones, without which an engine is not ready.

    def __len__(self) -> int:
        """The number of captures and measurements that are left."""
        return len(self._pending)

    def fill(self, max_batch: int, ready_batch: int | None = None) -> None:
        """Plan the graphs of all batches up to `max_batch`: first those of `ready_batches`.

        Steps that change the shape come later: a batch does so rarely, and may wait for the graph.
        """
        self._pending.clear()
        batches = batch_sizes(max_batch)
        prefills = list(self.stepper.prefill.usual_sizes(max_batch, self.drafter_shape))
        # The largest prefills may hold more requests than any batch.
        sizes = {
            batch: [size for size in prefills if min(size.requests, batches[-1]) == batch]
            for batch in batches
        }
        first = ready_batches(ready_batch, max_batch)
        for batch in first:
            self._pending += self._batch_work(batch, sizes[batch])
        self._ready = len(self._pending)
        for batch in first:
            self._pending += self._switching_steps(batch)
        for batch in batches:
            if batch not in first:
                self._pending += self._batch_work(batch, sizes[batch])
                self._pending += self._switching_steps(batch)

    def clear(self) -> None:
        self._pending.clear()

    def run(self, ready_batch: int | None, capture: CaptureStep) -> None:
        """Compile the kernels of all planned graphs; capture those of `ready_batches`.

        `ready_batch` None: capture all of them.
        """
        if not self._pending:
            return
        with self.times.measure("compile"):
            self.compile()
        for _ in range(len(self) if ready_batch is None else self._ready):
            self.run_next(capture)

    def compile(self, wait: bool = True) -> None:
        """Compile the kernels of all planned graphs; `wait`: see `compile_ahead`."""
        compile_ahead(self._launch_all, self.stepper.slots.device, self.describe(), wait)

    def describe(self) -> str:
        """What the kernels of the planned graphs depend on; their order does not matter."""
        target = self.stepper.target
        return "\n".join(
            (
                str(target.config.to_dict()),
                f"{target.dtype} {target.format} {self.stepper.weights} {self.drafter_shape}",
                f"{self.stepper.batch_invariant} {self.stepper.slots.page_size}",
                str(self.stepper.drafter_config),
                *sorted(map(str, self._pending)),
            )
        )

    def run_next(self, capture: CaptureStep) -> bool:
        """Capture or measure one graph more; no request may be live. False if none is left.

        `capture`: captures a step of this batch size, verified and drafted shape.
        """
        if not self._pending:
            return False
        work = self._pending.popleft()
        phase = "calibrate" if isinstance(work, Calibration) else "capture"
        with self.times.measure(phase):
            if isinstance(work, StepGraph):
                capture(work.batch, work.verify_shape, work.draft_shape)
            elif isinstance(work, PrefillGraph):
                self.stepper.prefill.capture(work.size, self.drafter_shape)
            elif self.adaptive is not None:
                self.adaptive.calibrate(graph_costs(self.stepper, self.shapes, (work.batch,)))
        return True

    def _batch_work(self, batch: int, prefills: Iterable[PrefillSize]) -> Iterator[Work]:
        for shape in self.shapes:
            yield StepGraph(batch, shape, shape)
        if self.adaptive is not None:
            yield Calibration(batch)
        for size in prefills:
            yield PrefillGraph(batch, size)

    def _switching_steps(self, batch: int) -> Iterator[Work]:
        for verify_shape, draft_shape in self._steps(batch):
            if verify_shape != draft_shape:
                yield StepGraph(batch, verify_shape, draft_shape)

    def _steps(self, batch: int) -> dict[tuple[DraftShape, DraftShape], None]:
        """The verified and drafted shapes of steps, without repeats."""
        steps = [(shape, shape) for shape in self.shapes]
        steps += [(shape, self.drafter_shape) for shape in self.shapes]
        if self.adaptive is not None and batch >= MIN_NEIGHBOR_BATCH:
            steps += pairwise(self.adaptive.candidates)
        return dict.fromkeys(steps)

    def _launch_all(self) -> None:
        """Launch the kernels of all planned graphs, for `compile_ahead`."""
        batches = {work.batch for work in self._pending}
        for batch in batches.intersection(COMPILED_BATCHES):
            steps = self._steps(batch)
            for shape in self.shapes:
                draft_shapes = [draft for verified, draft in steps if verified == shape]
                self.stepper.launch_padding(batch, shape, draft_shapes)
        for size in self.stepper.prefill.usual_sizes(max(batches), self.drafter_shape):
            if size.requests in COMPILED_PREFILLS:
                self.stepper.prefill.launch_padding(size, self.drafter_shape)


def ready_batches(ready_batch: int | None, max_batch: int) -> tuple[int, ...]:
    """The batch sizes whose graphs are captured first: a single request, and `ready_batch`.

    Numbers of requests in between run with the graphs of `ready_batch` until they have their own.
    """
    if not ready_batch:
        return ()
    return tuple(dict.fromkeys((1, batch_sizes(min(ready_batch, max_batch))[-1])))


def batch_sizes(max_batch: int) -> list[int]:
    """The batch sizes with graphs that hold up to `max_batch` requests."""
    smaller = [size for size in BATCH_BUCKETS if size < max_batch]
    return [*smaller, *BATCH_BUCKETS[len(smaller) : len(smaller) + 1]]
