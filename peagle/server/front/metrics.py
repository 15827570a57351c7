"""RequestMetrics: /metrics under vLLM's names.

Counters and gauges are read from the engines at each scrape; histograms are filled per request.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from peagle.server.front.engine_counts import EngineCounts
from peagle.server.http.response_counts import ResponseCounts

LABELS = ["model_name", "engine"]
FINISH_REASONS = ("stop", "length", "abort", "error", "refused")
# Metric name without "vllm:" -> counter of StatusCounts, help text.
COUNTERS = {
    "spec_decode_num_drafts": ("drafts", "Passes that verified drafts."),
    "spec_decode_num_draft_tokens": ("draft_tokens", "Drafted tokens."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Accepted draft tokens."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens."),
    "generation_tokens": ("generated_tokens", "Generated tokens."),
    "num_preemptions": ("preemptions", "Requests that lost their KV pages and were recomputed."),
    "prefix_cache_queries": ("prefix_queries", "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hits", "Tokens found in the prefix cache."),
}
# Metric name -> key of the engine's status, help text.
GAUGES = {
    "vllm:num_requests_running": ("running", "Running requests."),
    "vllm:num_requests_waiting": ("waiting", "Waiting requests."),
    "vllm:kv_cache_usage_perc": ("kv_usage", "Fraction of the KV pages in use, 0 to 1."),
    "peagle:num_speculative_tokens": ("k", "K of the last step."),
    "peagle:num_speculative_nodes": (
        "nodes",
        "Drafts verified in the last step: K for a chain, more for a tree.",
    ),
    "peagle:acceptance_length": ("acceptance_length", "1 + accepted / drafts, since the start."),
}
# Metric name without "peagle:" -> help text.
SERVER_GAUGES = {
    "engine_up": "1 while requests are answered, else 0.",
    "driver_heartbeat_age_seconds": (
        "Seconds since an engine process was heard last; large if a step hangs."
    ),
    "num_prompt_scorings": "Prompts whose own log-probabilities (echo) are computed or waited for.",
}
LATENCY_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
DURATION_BUCKETS = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10),
    *(15, 20, 30, 40, 50, 60, 120, 240, 480, 960),
)
TOKEN_BUCKETS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000),
    *(10_000, 20_000, 50_000, 100_000),
)
# Metric name without "vllm:" -> help text, buckets.
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Time to the first token.", LATENCY_BUCKETS),
    "inter_token_latency_seconds": ("Time between two chunks of an answer.", LATENCY_BUCKETS),
    "request_time_per_output_token_seconds": (
        "Seconds per token after the first one, per request.",
        LATENCY_BUCKETS,
    ),
    "e2e_request_latency_seconds": ("Time to the last token.", DURATION_BUCKETS),
    "request_queue_time_seconds": ("Time in the queue.", DURATION_BUCKETS),
    "request_prompt_tokens": ("Prompt tokens of a request.", TOKEN_BUCKETS),
    "request_generation_tokens": ("Generated tokens of a request.", TOKEN_BUCKETS),
}


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that generated tokens. Times are monotonic seconds."""

    arrival: float
    admitted: float | None
    first_token: float
    last_token: float
    prompt_tokens: int
    generated_tokens: int


class RequestMetrics:
    def __init__(
        self, model: str, engines: EngineCounts, responses: ResponseCounts, shared: bool
    ) -> None:
        """`shared`: several fronts count, and prometheus_client sums what they have written."""
        self.model = model
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(model, engines))
        self.histograms = {
            name: Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=None)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        if shared:
            MultiProcessCollector(self.registry)
        else:
            ProcessCollector(registry=self.registry)
            for collector in (responses, *self.histograms.values()):
                self.registry.register(collector)
        self._labeled: dict[tuple[str, str], Histogram] = {}

    def page(self) -> bytes:
        """The metrics in the text format of Prometheus."""
        return generate_latest(self.registry)

    def observe_chunk(self, engine: str, seconds: float, first: bool) -> None:
        """Count the latency of a chunk: since the arrival for the first, else since the last."""
        name = "time_to_first_token_seconds" if first else "inter_token_latency_seconds"
        self._observe(name, engine, seconds)

    def observe_request(self, engine: str, request: FinishedRequest) -> None:
        duration = request.last_token - request.arrival
        self._observe("e2e_request_latency_seconds", engine, duration)
        if request.admitted is not None:
            queue_time = max(0.0, request.admitted - request.arrival)
            self._observe("request_queue_time_seconds", engine, queue_time)
        if request.generated_tokens > 1:
            decode_seconds = request.last_token - request.first_token
            per_token = decode_seconds / (request.generated_tokens - 1)
            self._observe("request_time_per_output_token_seconds", engine, per_token)
        self._observe("request_prompt_tokens", engine, request.prompt_tokens)
        self._observe("request_generation_tokens", engine, request.generated_tokens)

    def _observe(self, name: str, engine: str, value: float) -> None:
        histogram = self._labeled.get((name, engine))
        if histogram is None:  # `labels` takes longer than `observe`, so its result is kept.
            histogram = self.histograms[name].labels(self.model, engine)
            self._labeled[name, engine] = histogram
        histogram.observe(value)


class EngineCollector(Collector):
    """Reads the engines' own counters at each scrape."""

    def __init__(self, model: str, engines: EngineCounts) -> None:
        self.model = model
        self.engines = engines

    def describe(self) -> list[Metric]:
        return []  # Prometheus must not call `collect` before there are engines.

    def collect(self) -> Iterator[Metric]:
        counts = self.engines.counts()
        yield from self._counters(counts)
        yield from self._breakdowns(counts)
        yield from self._gauges(self.engines.statuses())
        yield from self._server_gauges()
        restarts = CounterMetricFamily(
            "peagle:engine_restarts", "Restarts of engine processes.", labels=["model_name"]
        )
        restarts.add_metric([self.model], self.engines.restarts)
        yield restarts

    def _server_gauges(self) -> Iterator[Metric]:
        values = {
            "engine_up": float(self.engines.is_up),
            "driver_heartbeat_age_seconds": self.engines.silence,
            "num_prompt_scorings": self.engines.scorings,
        }
        for name, value in values.items():
            family = GaugeMetricFamily(f"peagle:{name}", SERVER_GAUGES[name], labels=["model_name"])
            family.add_metric([self.model], value)
            yield family

    def _counters(self, counts: Mapping[str, Counter[str]]) -> Iterator[Metric]:
        for name, (key, text) in COUNTERS.items():
            family = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for engine, counter in counts.items():
                family.add_metric([self.model, engine], counter[key])
            yield family

    def _breakdowns(self, counts: Mapping[str, Counter[str]]) -> Iterator[Metric]:
        """Accepted tokens by draft position, and finished requests by reason."""
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position.",
            labels=[*LABELS, "position"],
        )
        finished = CounterMetricFamily(
            "vllm:request_success",
            "Finished requests by finish reason.",
            labels=[*LABELS, "finished_reason"],
        )
        for engine, counter in counts.items():
            positions = sum(key.startswith("accepted_at:") for key in counter)
            for i in range(positions):
                accepted.add_metric([self.model, engine, str(i)], counter[f"accepted_at:{i}"])
            for reason in FINISH_REASONS:
                finished.add_metric([self.model, engine, reason], counter[f"finished:{reason}"])
        yield accepted
        yield finished

    def _gauges(self, status: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
        for name, (key, text) in GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=LABELS)
            for engine, values in status.items():
                family.add_metric([self.model, engine], values[key])
            yield family
