"""vLLM's /metrics: passed on with a few metrics of the gateway, and read for the status."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from peagle.server.front.engine_status import acceptance_fields
from peagle.server.http.response_counts import ResponseCounts
from peagle.server.vllm.vllm_process import VllmProcess

# Fields of an engine's status, by the vLLM metric that has the same meaning.
STATUS_FIELDS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
}


class GatewayMetrics(Collector):
    def __init__(self, process: VllmProcess, model_name: str, in_flight: int) -> None:
        self.process = process
        self.model_name = model_name
        self.in_flight = in_flight

    def collect(self) -> Iterator[Metric]:
        is_ready = float(self.process.state == "ready")
        labels = {"model_name": self.model_name}
        worker_labels = labels | {"worker": self.process.name}
        restarts = CounterMetricFamily(
            "peagle:engine_restarts", "Restarts of vLLM.", labels=list(labels)
        )
        restarts.add_metric(list(labels.values()), self.process.restarts)
        yield restarts
        for name, text, values, value in (
            ("peagle:engine_up", "1: requests are answered.", labels, is_ready),
            ("peagle:worker_up", "1: vLLM answers.", worker_labels, is_ready),
            ("peagle:worker_requests", "Requests in vLLM.", worker_labels, self.in_flight),
        ):
            family = GaugeMetricFamily(name, text, labels=list(values))
            family.add_metric(list(values.values()), value)
            yield family


def render_metrics(vllm_text: str, own: GatewayMetrics, response_counts: ResponseCounts) -> bytes:
    """Return the metrics of the gateway, then vLLM's document as it is."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(own)
    registry.register(response_counts)
    return generate_latest(registry) + vllm_text.encode()


def parse_vllm_metrics(text: str) -> dict[str, Any]:
    """Sum all engines of a vLLM; there are several with data parallelism."""
    status: dict[str, Any] = dict.fromkeys(STATUS_FIELDS.values(), 0)
    by_position: Counter[int] = Counter()
    kv_usages: list[float] = []
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if key := STATUS_FIELDS.get(sample.name):
                status[key] += int(sample.value)
            elif sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                by_position[int(sample.labels["position"])] += int(sample.value)
            elif sample.name == "vllm:kv_cache_usage_perc":
                kv_usages.append(sample.value)
    accepted_at = [by_position[i] for i in range(len(by_position))]
    status["accepted_at"] = accepted_at
    status["kv_usage"] = sum(kv_usages) / len(kv_usages) if kv_usages else 0.0
    # vLLM's K is fixed: every draft has a token at every position.
    drafted_at = [status["drafts"]] * len(accepted_at)
    return status | acceptance_fields(
        status["drafts"], status["accepted_tokens"], accepted_at, drafted_at
    )
