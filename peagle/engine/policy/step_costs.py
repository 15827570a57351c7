"""StepCosts: the duration of a step in seconds, by batch size and number of drafted nodes.

Durations are measured as steps run; a duration that was not measured is estimated from those that
were. A chain of K has K nodes.
"""

from collections import deque
from collections.abc import Mapping

from peagle.interpolation import fit_line, interpolate

# Samples kept per (bucket, nodes). Their lower quartile is the cost: disturbances only add time.
MAX_SAMPLES = 15
# One sample counts for at most this many times the cost known before.
MAX_SLOWDOWN = 1.5


class StepCosts:
    """Seconds of a step, by bucket of batch sizes (1 2 3 4 6 8 12 16 24 32 48 64 ...) and nodes.

    `seconds(batch, nodes)` is the first of these that is known:

    1. The lower quartile of the samples of this bucket and node count.
    2. calibrated[nodes] * measured[n] / calibrated[n], where n is the measured node count nearest
       to `nodes`. `calibrate` gives costs without the host's share, so calibration gives the
       slope over node counts and measurement gives the level. Larger buckets than the calibrated
       ones lie on the line through the two largest of these.
    3. The line through this bucket's own measurements: costs are about linear in nodes.
    4. The same line between the nearest other buckets, scaled to this bucket's one measurement
       if there is one.

    Example: bucket 1 took 1.0 s with 0 nodes and 1.7 s with 7; bucket 16 took 3.0 and 4.4 s.

        seconds(1, 3)  = 1.3              rule 3: 1.0 + 3/7 * 0.7
        seconds(8, 0)  = 1.93             rule 4: 1.0 + 7/15 * 2.0
        seconds(64, 7) = 4.4              rule 4: the nearest bucket
        seconds(64, 7) = 6.0 * 4.4 / 3.0  the same after 6.0 s were measured for (64, 0)
    """

    def __init__(self) -> None:
        self.samples: dict[int, dict[int, deque[float]]] = {}  # bucket -> nodes -> seconds
        self.measured: dict[int, dict[int, float]] = {}  # bucket -> nodes -> seconds
        self.calibrated: dict[int, dict[int, float]] = {}  # nodes -> bucket -> seconds
        # bucket -> nodes -> seconds: `calibrated`, interpolated between buckets
        self._calibrated_by_bucket: dict[int, dict[int, float]] = {}

    @staticmethod
    def bucket(batch: int) -> int:
        """The smallest bucket that holds this batch size: a power of 2, or 3/4 of one."""
        power = 1 << (batch - 1).bit_length()
        return power * 3 // 4 if power > 2 and batch <= power * 3 // 4 else power

    def calibrate(self, batch: int, nodes: int, seconds: float) -> None:
        """Record a cost measured before the first request, without the host's share."""
        self.calibrated.setdefault(nodes, {})[self.bucket(batch)] = seconds
        self._calibrated_by_bucket.clear()

    def add(self, batch: int, nodes: int, seconds: float) -> None:
        """Record the duration of one step."""
        bucket = self.bucket(batch)
        samples = self.samples.setdefault(bucket, {}).setdefault(nodes, deque(maxlen=MAX_SAMPLES))
        expected = self.measured.get(bucket, {}).get(nodes)
        samples.append(seconds if expected is None else min(seconds, MAX_SLOWDOWN * expected))
        self.measured.setdefault(bucket, {})[nodes] = sorted(samples)[len(samples) // 4]

    def drop_old_samples(self, batch: int, nodes: int) -> None:
        """Keep only the last two samples, so that new ones soon decide the cost."""
        samples = self.samples.get(self.bucket(batch), {}).get(nodes, deque())
        while len(samples) > 2:
            samples.popleft()

    def forget(self, batch: int, nodes: int) -> None:
        """Drop all samples: the cost is estimated from others until it is measured again."""
        bucket = self.bucket(batch)
        self.samples.get(bucket, {}).pop(nodes, None)
        self.measured.get(bucket, {}).pop(nodes, None)

    def sample_count(self, batch: int, nodes: int) -> int:
        return len(self.samples.get(self.bucket(batch), {}).get(nodes, ()))

    def measured_lengths(self, batch: int) -> int:
        """How many node counts have a measured cost in this bucket."""
        return len(self.measured.get(self.bucket(batch), {}))

    def seconds(self, batch: int, nodes: int) -> float | None:
        """The measured or estimated cost, as the class says; None if nothing tells it."""
        bucket = self.bucket(batch)
        own = self.measured.get(bucket, {})
        if nodes in own:
            return own[nodes]
        if nodes in self.calibrated:
            calibrated = self._calibrated_costs(bucket)
            near = min(
                (n for n in own if n in calibrated), key=lambda n: abs(n - nodes), default=None
            )
            return (
                calibrated[nodes]
                if near is None
                else calibrated[nodes] * own[near] / calibrated[near]
            )
        if len(own) > 1:
            return fit_line(own, nodes)
        if not own:
            return self.seconds_elsewhere(batch, nodes)
        [(near, seconds)] = own.items()
        at_nodes = self.seconds_elsewhere(batch, nodes)
        at_near = self.seconds_elsewhere(batch, near)
        return None if at_nodes is None or at_near is None else seconds * at_nodes / at_near

    def seconds_elsewhere(self, batch: int, nodes: int) -> float | None:
        """The cost interpolated between the nearest other buckets; None if no other is known."""
        bucket = self.bucket(batch)
        costs = {
            other: fit_line(measured, nodes)
            for other, measured in self.measured.items()
            if other != bucket and len(measured) > 1
        }
        return interpolate(costs, bucket) if costs else None

    def _calibrated_costs(self, bucket: int) -> dict[int, float]:
        """Calibrated seconds by nodes, interpolated between the calibrated buckets."""
        if bucket not in self._calibrated_by_bucket:
            self._calibrated_by_bucket[bucket] = {
                nodes: calibrated_cost(costs, bucket) for nodes, costs in self.calibrated.items()
            }
        return self._calibrated_by_bucket[bucket]


def calibrated_cost(costs: Mapping[int, float], bucket: int) -> float:
    """The cost in a bucket, given those of calibrated buckets, which may all be smaller."""
    return fit_line(costs, bucket) if len(costs) > 1 else next(iter(costs.values()))
