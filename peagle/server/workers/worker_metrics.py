"""/metrics of workers as one page: their own series under their own names, each name told once, and a few of ours.

Of several workers, the label `engine` gets the worker's name behind it ("p-eagle replica-1"); series without that label
(a process's memory, say) get the label `worker`.
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

FRONTS = (
    "peagle:engine_up",
    "peagle:engine_restarts",
    "peagle:requests",
)  # a worker's own would be mistaken for the server's


class WorkerMetrics(Collector):
    def __init__(self, pages: Mapping[Worker, str], workers: WorkerSet, model: str) -> None:
        self.pages, self.workers, self.model = pages, workers, model

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for worker, page in self.pages.items():
            for family in text_string_to_metric_families(page):
                if family.name in FRONTS:
                    continue
                new = Metric(family.name, family.documentation, family.type)
                samples = families.setdefault(family.name, new).samples
                samples += [self._told(sample, worker) for sample in family.samples]
        yield from families.values()
        yield from self._ours()

    def _told(self, sample: Sample, worker: Worker) -> Sample:
        if len(self.workers.all) == 1:
            return sample
        labels = dict(sample.labels)
        if "engine" in labels:
            labels["engine"] += f" {worker.name}"
        else:
            labels["worker"] = worker.name
        return sample._replace(labels=labels)

    def _ours(self) -> Iterator[Metric]:
        labels = ["model_name", "worker"]
        up = GaugeMetricFamily("peagle:engine_up", "1: requests are answered.", labels=labels[:1])
        up.add_metric([self.model], float(bool(self.workers.ready)))
        restarts = CounterMetricFamily(
            "peagle:engine_restarts", "Workers started again.", labels=labels[:1]
        )
        restarts.add_metric([self.model], self.workers.restarts)
        each = GaugeMetricFamily("peagle:worker_up", "1: this worker answers.", labels=labels)
        busy = GaugeMetricFamily(
            "peagle:worker_requests", "Requests passed to it, under way.", labels=labels
        )
        for worker in self.workers.all:
            each.add_metric([self.model, worker.name], float(worker.state == "ready"))
            busy.add_metric([self.model, worker.name], worker.in_flight)
        yield from (up, restarts, each, busy)


def page_of(pages: Mapping[Worker, str], workers: WorkerSet, replies: ResponseCounts) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WorkerMetrics(pages, workers, replies.model))
    registry.register(replies)
    return generate_latest(registry)
