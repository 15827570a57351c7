"""Number of requests by the status of their response, including those that reach no engine."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

# Exported from the start with a count of 0.
COMMON_STATUSES = (200, 400, 429, 500, 503, 504)


class ResponseCounts(Collector):
    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.counts = Counter(dict.fromkeys(COMMON_STATUSES, 0))

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
            family.add_metric([self.model_name, str(status)], count)
        yield family
