"""How requests were answered: their number by status, as the front saw it. What it refuses, no engine counts."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

USUAL = (200, 400, 429, 500, 503, 504)  # told before there is one


class ResponseCounts(Collector):
    def __init__(self, model: str) -> None:
        self.model, self.counts = model, Counter(dict.fromkeys(USUAL, 0))

    def add(self, status: int) -> None:
        self.counts[status] += 1

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", "status"]
        family = CounterMetricFamily(
            "peagle:requests", "Requests, by the status of their reply.", labels=labels
        )
        for status, count in sorted(dict(self.counts).items()):
            family.add_metric([self.model, str(status)], count)
        yield family
