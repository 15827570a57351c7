"""What a step costs, in seconds, by batch size and drafted nodes: measured as steps run, or told by what is known.

A chain has K nodes. Where the device was timed before the first request, that gives the shape of what was not measured,
and what was measured its height. Else a cost is about linear in nodes above a floor, and in the batch size between two
that are known.
"""

from collections import deque

from peagle.interpolation import fit_line, interpolate

REMEMBERED = 15  # steps of a (bucket, nodes): their lower quartile is its cost, for what disturbs a step lengthens it
DISTURBED = 1.5  # times what was known: a step counts for no more


class StepCosts:
    """Seconds of a step by batch size and nodes. Batch sizes share buckets: 1 2 3 4 6 8 12 16 24 32 48 64 ..."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[int, deque[float]]] = {}
        self.known: dict[int, dict[int, float]] = {}  # bucket -> nodes -> seconds
        self.before: dict[
            int, dict[int, float]
        ] = {}  # nodes -> bucket -> seconds of the device alone, measured before
        self.bare: dict[
            int, dict[int, float]
        ] = {}  # bucket -> nodes -> the same, between buckets too

    @staticmethod
    def bucket(batch: int) -> int:
        power = 1 << (batch - 1).bit_length()
        return power * 3 // 4 if power > 2 and batch <= power * 3 // 4 else power

    def add(self, batch: int, nodes: int, seconds: float) -> None:
        bucket = self.bucket(batch)
        seen = self.seen.setdefault(bucket, {}).setdefault(nodes, deque(maxlen=REMEMBERED))
        expected = self.known.get(bucket, {}).get(nodes)
        seen.append(seconds if expected is None else min(seconds, DISTURBED * expected))
        self.known.setdefault(bucket, {})[nodes] = sorted(seen)[len(seen) // 4]

    def forget(self, batch: int, nodes: int) -> None:
        """All but the last two."""
        seen = self.seen.get(self.bucket(batch), {}).get(nodes, deque())
        while len(seen) > 2:
            seen.popleft()

    def seconds(self, batch: int, nodes: int) -> float | None:
        """Measured; or the device's alone, or as other buckets have it, moved to fit; or on the line through this
        bucket's own."""
        bucket = self.bucket(batch)
        own = self.known.get(bucket, {})
        if nodes in own:
            return own[nodes]
        if nodes in self.before:
            bare = self._bare(bucket)
            at = min((n for n in own if n in bare), key=lambda n: abs(n - nodes), default=None)
            return bare[nodes] if at is None else bare[nodes] * own[at] / bare[at]
        if len(own) > 1:
            return fit_line(own, nodes)
        if not own:
            return self.elsewhere(batch, nodes)
        [(at, seconds)] = own.items()
        there, here = self.elsewhere(batch, nodes), self.elsewhere(batch, at)
        return None if there is None or here is None else seconds * there / here

    def calibrate(self, batch: int, nodes: int, seconds: float) -> None:
        """Before the first step: without the host's share."""
        self.before.setdefault(nodes, {})[self.bucket(batch)] = seconds
        self.bare.clear()

    def _bare(self, bucket: int) -> dict[int, float]:
        if bucket not in self.bare:
            self.bare[bucket] = {
                nodes: interpolate(of, bucket) for nodes, of in self.before.items()
            }
        return self.bare[bucket]

    def count(self, batch: int, nodes: int) -> int:
        return len(self.seen.get(self.bucket(batch), {}).get(nodes, ()))

    def elsewhere(self, batch: int, nodes: int) -> float | None:
        """Between the nearest other buckets on both sides; the nearest one's where there is one side only."""
        bucket = self.bucket(batch)
        curves = {
            other: fit_line(own, nodes)
            for other, own in self.known.items()
            if other != bucket and len(own) > 1
        }
        return interpolate(curves, bucket) if curves else None
