"""/metrics under vLLM's names: counters and gauges from the engines when they are asked for, histograms per request."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from peagle.server.engines.engine_pool import ServerEngines
    from peagle.server.openai.answer import Answer, Choice

LABELS = ["model_name", "engine"]
REASONS = ("stop", "length", "abort", "error", "refused")
COUNTERS = {
    "spec_decode_num_drafts": ("drafts", "Passes that verified drafts."),
    "spec_decode_num_draft_tokens": ("draft_tokens", "Tokens drafted."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Drafts accepted."),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "generation_tokens": ("generated_tokens", "Tokens of answers."),
    "num_preemptions": (
        "preemptions",
        "Requests that gave their pages back and were computed again.",
    ),
    "prefix_cache_queries": ("prefix_queries", "Tokens looked for in the prefix cache."),
    "prefix_cache_hits": ("prefix_hits", "Tokens found there."),
}
GAUGES = {
    "vllm:num_requests_running": ("running", "Requests that run."),
    "vllm:num_requests_waiting": ("waiting", "Requests that wait."),
    "vllm:kv_cache_usage_perc": ("kv_usage", "Share of the pages that are held, 0 to 1."),
    "peagle:num_speculative_tokens": ("k", "K of the last step."),
    "peagle:num_speculative_nodes": (
        "nodes",
        "Drafts the last step verified: K of a chain, more of a tree.",
    ),
    "peagle:acceptance_length": ("acceptance_length", "1 + accepted / drafts, since the start."),
}
SHORT = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
LONG = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Until the first token.", SHORT),
    "inter_token_latency_seconds": ("Between two chunks of an answer.", SHORT),
    "request_time_per_output_token_seconds": (
        "Seconds a token after the first, of a request.",
        SHORT,
    ),
    "e2e_request_latency_seconds": ("Until the last token.", LONG),
    "request_queue_time_seconds": ("Until the engine took the request in.", LONG),
    "request_prompt_tokens": ("Tokens of a prompt.", COUNTS),
    "request_generation_tokens": ("Tokens of an answer.", COUNTS),
}


class RequestMetrics:
    def __init__(self, model: str, engines: "ServerEngines", *others: Collector) -> None:
        self.model, self.registry = model, CollectorRegistry()
        for one in (EngineCollector(model, engines), *others):
            self.registry.register(one)
        ProcessCollector(registry=self.registry)
        self.histograms = {
            name: Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self.series: dict[tuple[str, str], Histogram] = {}

    def page(self) -> bytes:
        return generate_latest(self.registry)

    def piece(self, engine: str, seconds: float, first: bool) -> None:
        self._observe(
            "time_to_first_token_seconds" if first else "inter_token_latency_seconds",
            engine,
            seconds,
        )

    def choice(self, engine: str, choice: "Choice") -> None:
        """An answer came to its end."""
        ticket, spent = choice.ticket, choice.last - choice.ticket.arrival
        self._observe("e2e_request_latency_seconds", engine, spent)
        if ticket.admitted is not None:
            self._observe(
                "request_queue_time_seconds", engine, max(0.0, ticket.admitted - ticket.arrival)
            )
        if choice.tokens > 1:
            each = (choice.last - choice.first) / (choice.tokens - 1)
            self._observe("request_time_per_output_token_seconds", engine, each)
        self._observe("request_prompt_tokens", engine, choice.prompt_tokens)
        self._observe("request_generation_tokens", engine, choice.tokens)

    def answer(self, answer: "Answer") -> None:
        for choice in answer.choices:
            if choice.reason is not None and choice.tokens:
                self.choice(answer.slot.name, choice)

    def _observe(self, name: str, engine: str, value: float) -> None:
        found = self.series.get((name, engine))
        if found is None:  # looking it up takes longer than counting
            found = self.series[name, engine] = self.histograms[name].labels(self.model, engine)
        found.observe(value)


class EngineCollector(Collector):
    """Asks the engines; they count anyway."""

    def __init__(self, model: str, engines: "ServerEngines") -> None:
        self.model, self.engines = model, engines

    def describe(self) -> list[Metric]:
        return []  # names are known when there are engines

    def collect(self) -> Iterator[Metric]:
        counts = self.engines.counts()
        yield from self._counters(counts)
        yield from self._gauges(self.engines.status())
        up = GaugeMetricFamily(
            "peagle:engine_up", "1: requests are answered.", labels=["model_name"]
        )
        up.add_metric([self.model], float(self.engines.state == "ready"))
        restarts = CounterMetricFamily(
            "peagle:engine_restarts", "ServerEngines made again.", labels=["model_name"]
        )
        restarts.add_metric([self.model], self.engines.restarts)
        yield from (up, restarts)

    def _counters(self, counts: dict[str, Any]) -> Iterator[Metric]:
        for name, (key, text) in COUNTERS.items():
            family = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            for engine, told in counts.items():
                family.add_metric([self.model, engine], told[key])
            yield family
        at = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted.",
            labels=[*LABELS, "position"],
        )
        done = CounterMetricFamily(
            "vllm:request_success", "Answers, by their end.", labels=[*LABELS, "finished_reason"]
        )
        for engine, told in counts.items():
            for position in sorted(
                key[1] for key in told if isinstance(key, tuple) and key[0] == "accepted_at"
            ):
                at.add_metric([self.model, engine, str(position)], told["accepted_at", position])
            for reason in REASONS:
                done.add_metric([self.model, engine, reason], told["finished", reason])
        yield from (at, done)

    def _gauges(self, status: dict[str, dict[str, Any]]) -> Iterator[Metric]:
        for name, (key, text) in GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=LABELS)
            for engine, told in status.items():
                family.add_metric([self.model, engine], told[key])
            yield family
