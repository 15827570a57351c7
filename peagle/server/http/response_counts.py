"""Number of requests by the status of their response, including those that reach no engine."""

from collections.abc import Iterator

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

# Exported from the start with a count of 0.
COMMON_STATUSES = (200, 400, 429, 500, 503, 504)
NAME = "peagle:requests"
HELP = "Requests, by the status of their reply."
LABELS = ("model_name", "status")


class ResponseCounts(Collector):
    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        # With several fronts, prometheus_client writes its counts where it can sum them.
        self._counter = Counter(NAME, HELP, LABELS, registry=None)
        for status in COMMON_STATUSES:
            self._counter.labels(model_name, str(status))

    def add(self, status: int) -> None:
        self._counter.labels(self.model_name, str(status)).inc()

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        """The counts of this process, without the times at which they began."""
        family = CounterMetricFamily(NAME, HELP, labels=LABELS)
        for metric in self._counter.collect():
            for sample in sorted(metric.samples, key=lambda sample: sample.labels["status"]):
                if sample.name.endswith("_total"):
                    family.add_metric(list(sample.labels.values()), sample.value)
        yield family
