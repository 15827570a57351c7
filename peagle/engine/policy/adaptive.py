"""AdaptivePolicy: draft the shape that is expected to give the most tokens per second.

    E(shape)       expected tokens per step and request (yield_model.py)
    c(b, nodes)    seconds per step of b requests (step_costs.py)
    choose         the shape with the largest b E(shape) / c(b, nodes)

A step without drafts shows nothing about acceptance, and a step of one shape nothing about the
cost of others. The policy therefore explores: now and then it spends two steps on another shape,
which is a neighbor of the best shape in the order of nodes, a tree beside a chain, or the best
chain beside a tree. It explores smaller shapes less often, because larger ones show what those
accept. A credit of 1 % of the steps pays for the time that exploration loses. No exploration
starts in a step whose duration is not measured because a prefill runs in it too. All choices are
deterministic, given the observations.

Without drafts, too, the drafter's KV cache is brought up to date: on a GPU in every step, which is
part of c(b, 0), and on a CPU once in a page (engine/kv/deferred_rows.py).
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from peagle.draft_shape import NO_DRAFT, DraftShape
from peagle.engine.policy.accepted import AcceptedCounts
from peagle.engine.policy.draft_policy import DraftChoice
from peagle.engine.policy.step_costs import StepCosts
from peagle.engine.policy.yield_model import YieldModel
from peagle.errors import UserError

# The policy switches to a shape only if it is this fraction faster than the current one.
SWITCH_MARGIN = 0.01
# Steps that exploration may lose: earned per step, and the most that can be saved up.
CREDIT_PER_STEP = 0.01
MAX_CREDIT = 2.0
# Steps between two explorations, by whether the best shape is NO_DRAFT.
EXPLORE_INTERVAL = {True: 8, False: 25}
# A shape known to lose more than this part of a step is not explored, by whether the best shape is
# NO_DRAFT (a chain of 1 cannot win more than 1 over that).
MAX_LOSS = {True: 1.0, False: 0.5}
# Ages are in steps of the same batch bucket. A shape that did not run for SAMPLE_AGE steps loses
# all but two cost samples; a smaller shape is measured again after SMALLER_SHAPE_AGE; after
# MAX_COST_AGE no cost is trusted any more.
SAMPLE_AGE = 20
SMALLER_SHAPE_AGE = 250
MAX_COST_AGE = 1000
# The longest chain that is drafted while costs are unknown and the step cannot be timed.
MAX_UNTIMED_K = 3
# Steps that each end of the cost line runs where no cost is known.
FIRST_SAMPLES = 3


class AdaptivePolicy:
    def __init__(self, candidates: Sequence[DraftShape]) -> None:
        self.candidates = tuple(sorted(set(candidates), key=lambda shape: (shape.nodes, shape.k)))
        if NO_DRAFT not in self.candidates:
            names = ", ".join(map(str, self.candidates))
            raise UserError(
                f"adaptive drafting chooses among {names or 'no shapes'}, but K=0 must be"
                " one of them"
            )
        self.yields = YieldModel(self.candidates)
        self.costs = StepCosts()
        self.best_shape = NO_DRAFT
        # E(shape), and seconds per step at the batch size of the last choice.
        self.tokens = self.yields.expected_tokens()
        self.seconds: dict[DraftShape, float] = {}
        self._step = 0
        self._last_exploration = 0  # step
        self._credit = 0.0  # steps that exploration may lose
        # The shape to explore once more: its first step verified drafts of another shape.
        self._second_trial: DraftShape | None = None
        self._bucket_steps: Counter[int] = Counter()
        # (bucket, shape) -> the bucket's step in which the shape last ran
        self._last_run: dict[tuple[int, DraftShape], int] = {}

    def calibrate(self, costs: Mapping[tuple[int, DraftShape], float]) -> None:
        """Set costs by (batch, shape), measured before the first request, without the host."""
        for (batch, shape), seconds in costs.items():
            self.costs.calibrate(batch, shape.nodes, seconds)

    def choose(
        self,
        batch: int,
        draft_confidence: Sequence[float] | None = None,
        chains_only: bool = False,
        timed: bool = True,
    ) -> DraftChoice:
        shapes: Sequence[DraftShape] = self.candidates
        if chains_only:
            shapes = [shape for shape in shapes if shape.is_chain]
        if (unmeasured := self._unmeasured(batch, shapes, timed)) is not None:
            return DraftChoice(unmeasured, "measuring: its cost is not known yet")
        self.tokens = self.yields.expected_tokens(draft_confidence)
        self.seconds = {shape: self._cost(batch, shape) for shape in self.candidates}
        rates = {shape: batch * self.tokens[shape] / self.seconds[shape] for shape in shapes}
        fastest = max(rates, key=lambda shape: rates[shape])
        if self.best_shape not in rates:
            return DraftChoice(fastest, "fastest chain")
        reason = "fastest"
        if rates[fastest] > rates[self.best_shape] * (1 + SWITCH_MARGIN):
            self.best_shape = fastest
        elif fastest != self.best_shape:
            reason = f"held: {fastest} is less than {SWITCH_MARGIN:.0%} faster"
        trial = self._next_trial(batch, may_start=timed and not chains_only)
        if trial is None or trial not in rates:
            return DraftChoice(self.best_shape, reason)
        return DraftChoice(trial, f"exploring beside {self.best_shape}")

    def observe(
        self,
        batch: int,
        shape: DraftShape,
        seconds: float | None,
        accepted: Sequence[AcceptedCounts],
    ) -> None:
        bucket = self.costs.bucket(batch)
        self._step += 1
        self._bucket_steps[bucket] += 1
        self.yields.observe(batch, shape, accepted)
        self._credit = min(self._credit + CREDIT_PER_STEP, MAX_CREDIT)
        if seconds is None:
            return
        if self._bucket_steps[bucket] - self._last_run.get((bucket, shape), 0) > SAMPLE_AGE:
            self.costs.drop_old_samples(batch, shape.nodes)
        self._last_run[bucket, shape] = self._bucket_steps[bucket]
        self.costs.add(batch, shape.nodes, seconds)

    # --- costs ------------------------------------------------------------------------------------

    def _unmeasured(
        self, batch: int, shapes: Sequence[DraftShape], timed: bool
    ) -> DraftShape | None:
        """The shape whose cost must be measured before shapes can be compared, if any.

        Where no cost is known at all, these are no draft, the longest chain and the largest shape:
        the ends of the cost line. A shape with one sample runs once more, so that one disturbed
        step decides nothing.
        """
        counts = {shape: self.costs.sample_count(batch, shape.nodes) for shape in shapes}
        if not self.costs.calibrated and self.costs.seconds_elsewhere(batch, 0) is None:
            chains = [shape for shape in shapes if shape.is_chain]
            ends = (NO_DRAFT, chains[-1], shapes[-1])
            missing = [shape for shape in ends if counts[shape] < FIRST_SAMPLES]
            if missing and timed:
                return missing[0]
            if missing:
                return [shape for shape in chains if shape.k <= MAX_UNTIMED_K][-1]
        if not timed:
            return None
        return next((shape for shape, count in counts.items() if count == 1), None)

    def _cost(self, batch: int, shape: DraftShape) -> float:
        cost = self.costs.seconds(batch, shape.nodes)
        assert cost is not None, "unknown costs are measured first"
        return cost

    # --- exploration ------------------------------------------------------------------------------

    def _next_trial(self, batch: int, may_start: bool) -> DraftShape | None:
        """The shape to explore in this step: the second step of an exploration, or a new one."""
        trial = self._second_trial
        self._second_trial = None
        if trial is not None or not may_start:
            return trial
        trial = self._pick_trial(batch)
        if trial is not None:
            self._last_exploration = self._step
            self._second_trial = trial if trial.nodes > self.best_shape.nodes else None
            self._credit -= self._trial_loss(trial)
        return trial

    def _pick_trial(self, batch: int) -> DraftShape | None:
        """The shape worth exploring that ran longest ago, if it is time and the credit suffices.

        Neighbors with an untrusted cost are explored even if they look slow, and so is NO_DRAFT:
        plain decoding must never be faster. Smaller neighbors are soon measured once, because
        calibration may be wrong: experts that random rows choose are not those that text chooses.
        """
        no_draft = self.best_shape == NO_DRAFT
        if self._step - self._last_exploration < EXPLORE_INTERVAL[no_draft]:
            return None
        age = {shape: self._age(batch, shape) for shape in self.candidates}
        index = self.candidates.index(self.best_shape)
        around = self.candidates[max(0, index - 1) : index + 2]
        neighbors = [shape for shape in around if shape != self.best_shape]
        untrusted = [
            shape
            for shape in (NO_DRAFT, *neighbors)
            if shape != self.best_shape and age[shape] >= MAX_COST_AGE
        ]
        informative = [
            shape
            for shape in {*neighbors, *self._rivals()}
            if shape.nodes > self.best_shape.nodes
            or age[shape] >= SMALLER_SHAPE_AGE
            or not self._ran(batch, shape)
        ]
        options = untrusted or [
            shape for shape in informative if self._loss(shape) < MAX_LOSS[no_draft]
        ]
        affordable = [shape for shape in options if self._trial_loss(shape) <= self._credit]
        return max(affordable, key=lambda shape: (age[shape], -shape.nodes), default=None)

    def _rivals(self) -> list[DraftShape]:
        """Every tree, which shows what all smaller shapes accept; beside a tree, the best chain."""
        trees = [
            shape for shape in self.candidates if not shape.is_chain and shape != self.best_shape
        ]
        if self.best_shape.is_chain:
            return trees
        chains = (shape for shape in self.candidates if shape.is_chain)
        return [*trees, min(chains, key=self._loss)]

    def _loss(self, shape: DraftShape) -> float:
        """What one step of this shape loses against the best one, in steps of the best one.

        c(shape) / c(best) - E(shape) / E(best): its duration less the time in which the best shape
        emits as many tokens. A negative loss is a gain.
        """
        relative_cost = self.seconds[shape] / self.seconds[self.best_shape]
        return relative_cost - self.tokens[shape] / self.tokens[self.best_shape]

    def _trial_loss(self, shape: DraftShape) -> float:
        """What exploring this shape is expected to lose, in steps.

        It takes two steps: a larger shape must be drafted first, and after a smaller one the best
        shape must be drafted again.
        """
        return 2 * max(0.0, self._loss(shape))

    def _ran(self, batch: int, shape: DraftShape) -> bool:
        """Whether the shape has run with batches of this bucket."""
        return (self.costs.bucket(batch), shape) in self._last_run

    def _age(self, batch: int, shape: DraftShape) -> int:
        """Steps of this batch bucket since the shape last ran in it.

        A shape that never ran counts as untrusted, unless calibration gives its cost.
        """
        bucket = self.costs.bucket(batch)
        never = 0 if self.costs.calibrated else -MAX_COST_AGE
        return self._bucket_steps[bucket] - self._last_run.get((bucket, shape), never)
