"""LearnCollector: the metrics `peagle:learn_*`, read at each scrape."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from peagle.learn.status import TrainerState
from peagle.learn.versions import VersionState
from peagle.server.learning.folder_state import FolderState
from peagle.server.learning.process_reports import (
    Reports,
    failure_of,
    store_counts,
    version_counts,
)

# Metric name without "peagle:learn_" -> help text.
STORE_COUNTERS = {
    "documents": "Answered requests that were stored.",
    "tokens": "Tokens of stored requests.",
    "dropped": "Answered requests that were not stored: the queue or the disk was full.",
}


class LearnCollector(Collector):
    def __init__(
        self, model: str, reports: Callable[[], Reports], state: Callable[[], FolderState]
    ) -> None:
        self.model = model
        self._reports = reports
        self._state = state

    def describe(self) -> list[Metric]:
        return []  # Prometheus must not call `collect` before there are engines.

    def collect(self) -> Iterator[Metric]:
        reports = self._reports()
        state = self._state()
        counts = store_counts(reports)
        for name, text in STORE_COUNTERS.items():
            yield self._single(CounterMetricFamily, name, text, counts[name])
        has_failed = state.failure is not None or failure_of(reports) is not None
        yield self._single(
            GaugeMetricFamily,
            "up",
            "1 while requests are stored and versions load.",
            not has_failed,
        )
        text = "Bytes of stored requests."
        yield self._single(GaugeMetricFamily, "store_bytes", text, state.store.bytes)
        yield from self._versions(reports, state)
        yield self._trainer(state)

    def _single(
        self,
        family: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        value: float,
    ) -> Metric:
        metric = family(f"peagle:learn_{name}", text, labels=["model_name"])
        metric.add_metric([self.model], value)
        return metric

    def _versions(self, reports: Reports, state: FolderState) -> Iterator[Metric]:
        labels = ["model_name", "version"]
        drafts = CounterMetricFamily(
            "peagle:learn_drafts", "Passes that verified drafts of a version.", labels=labels
        )
        accepted = CounterMetricFamily(
            "peagle:learn_accepted_tokens", "Accepted draft tokens of a version.", labels=labels
        )
        for number, counts in version_counts(reports).items():
            drafts.add_metric([self.model, str(number)], counts.drafts)
            accepted.add_metric([self.model, str(number)], counts.accepted_tokens)
        running = GaugeMetricFamily(
            "peagle:learn_version",
            "Version of the drafter of an engine process; 0: the pair's own.",
            labels=["model_name", "process"],
        )
        for name, report in reports.items():
            running.add_metric([self.model, name], report.version)
        yield from (drafts, accepted, running)
        yield from self._records(state)

    def _records(self, state: FolderState) -> Iterator[Metric]:
        """Versions by state, and the acceptance lengths of the last comparison."""
        known = GaugeMetricFamily(
            "peagle:learn_versions", "Versions by state.", labels=["model_name", "state"]
        )
        states = Counter(record.state for record in state.versions)
        for name in get_args(VersionState):
            known.add_metric([self.model, name], states[name])
        yield known
        lengths = GaugeMetricFamily(
            "peagle:learn_held_back_acceptance_length",
            "Acceptance lengths on answers that were held back, in the last comparison.",
            labels=["model_name", "drafter"],
        )
        judged = [record.held_back for record in state.versions if record.held_back is not None]
        if judged:
            lengths.add_metric([self.model, "before"], judged[-1].before)
            lengths.add_metric([self.model, "after"], judged[-1].after)
        yield lengths

    def _trainer(self, state: FolderState) -> Metric:
        trainer = GaugeMetricFamily(
            "peagle:learn_trainer",
            "1 for the state of the trainer, else 0.",
            labels=["model_name", "state"],
        )
        for name in get_args(TrainerState):
            trainer.add_metric([self.model, name], float(name == state.trainer.state))
        return trainer
