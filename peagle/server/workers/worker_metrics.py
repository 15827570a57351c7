"""The metrics of all workers as one /metrics document, with a few metrics of the gateway.

With several workers, the label `engine` is followed by the worker's name ("p-eagle replica-1");
series without that label, like those of the process's memory, get the label `worker`.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from peagle.server.http.response_counts import ResponseCounts
from peagle.server.workers.worker import Worker
from peagle.server.workers.worker_set import WorkerSet

# Metrics that the gateway has itself; those of a worker would be mistaken for the server's.
GATEWAY_METRICS = ("peagle:engine_up", "peagle:engine_restarts", "peagle:requests")


class WorkerMetrics(Collector):
    def __init__(self, texts: Mapping[Worker, str], workers: WorkerSet, model_name: str) -> None:
        """`texts` are the /metrics documents of the workers."""
        self.texts = texts
        self.workers = workers
        self.model_name = model_name

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for worker, text in self.texts.items():
            for family in text_string_to_metric_families(text):
                if family.name in GATEWAY_METRICS:
                    continue
                empty = Metric(family.name, family.documentation, family.type)
                samples = families.setdefault(family.name, empty).samples
                samples += [self._add_worker(sample, worker) for sample in family.samples]
        yield from families.values()
        yield from self._gateway_metrics()

    def _add_worker(self, sample: Sample, worker: Worker) -> Sample:
        """Add the worker's name to the labels, if there are several workers."""
        if len(self.workers.all) == 1:
            return sample
        labels = dict(sample.labels)
        if "engine" in labels:
            labels["engine"] += f" {worker.name}"
        else:
            labels["worker"] = worker.name
        return sample._replace(labels=labels)

    def _gateway_metrics(self) -> Iterator[Metric]:
        labels = ["model_name", "worker"]
        up = GaugeMetricFamily("peagle:engine_up", "1: requests are answered.", labels=labels[:1])
        up.add_metric([self.model_name], float(bool(self.workers.ready)))
        restarts = CounterMetricFamily(
            "peagle:engine_restarts", "Workers started again.", labels=labels[:1]
        )
        restarts.add_metric([self.model_name], self.workers.restarts)
        worker_up = GaugeMetricFamily("peagle:worker_up", "1: this worker answers.", labels=labels)
        in_flight = GaugeMetricFamily(
            "peagle:worker_requests", "Requests passed to it, under way.", labels=labels
        )
        for worker in self.workers.all:
            worker_labels = [self.model_name, worker.name]
            worker_up.add_metric(worker_labels, float(worker.state == "ready"))
            in_flight.add_metric(worker_labels, worker.in_flight)
        yield from (up, restarts, worker_up, in_flight)


def render_metrics(
    texts: Mapping[Worker, str], workers: WorkerSet, response_counts: ResponseCounts
) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WorkerMetrics(texts, workers, response_counts.model_name))
    registry.register(response_counts)
    return generate_latest(registry)
