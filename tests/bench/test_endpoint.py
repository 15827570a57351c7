"""The load on an HTTP server: requests, metrics, and failures of the server."""

import asyncio
from typing import Any

import httpx
import pytest

from peagle.bench.load.endpoint import EndpointRunner, endpoint_urls
from peagle.bench.load.server_metrics import parse_metrics
from peagle.bench.load.sse import read_events
from peagle.errors import UserError
from peagle.results.key import CellKey
from peagle.results.spec_counters import SpecCounters
from tests.support.bench.benching import serving, some_jobs

KEY = CellKey("x", "endpoint", 0, 3)


def endpoint(url: str, warmup: int = 0, read: float = 60.0) -> EndpointRunner:
    return EndpointRunner(url, None, "secret", temperature=0.0, warmup=warmup, read_timeout=read)


def test_requests_and_metrics_of_a_run() -> None:
    first = (4, 5, 6)  # the first requests after the warm-up
    with serving(wait=0.02, together=first) as server:
        seen: list[int] = []
        run = endpoint(server.url, warmup=2).run(KEY, some_jobs(5, turns=2), lambda: seen.append(1))
    metrics = run.metrics()
    assert len(seen) == metrics.requests == 10
    assert metrics.failed == 0
    assert metrics.total_output_tokens == 60
    assert server.max_concurrent == 3
    assert metrics.median_itl_ms >= 20
    assert metrics.median_ttft_ms >= 20
    assert metrics.spec_decode_acceptance_length == 2
    assert metrics.spec_decode_acceptance_rate == 50
    assert metrics.spec_decode_per_position_acceptance_rates == pytest.approx([2 / 3, 1 / 3])
    assert metrics.spec_decode_num_drafts == 30  # without the warm-up
    first, second = (
        server.requests[3],
        next(body for body in server.requests if len(body["messages"]) == 3),
    )
    assert first["authorization"] == "Bearer secret"
    assert first["model"] == "served"
    assert first["stream_options"] == {"include_usage": True}
    assert first["max_tokens"] == 12
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == "w0 w1 w2 w3 w4 w5 "  # the answer to the first turn


def test_without_metrics_or_usage() -> None:
    with serving(metrics=False, failure="no usage") as server:
        metrics = endpoint(server.url).run(KEY, some_jobs(2), lambda: None).metrics()
    assert metrics.spec_decode_acceptance_length is None
    assert metrics.total_output_tokens == 6  # Chunks are counted if the server reports no usage.


@pytest.mark.parametrize(
    ("failure", "message"),
    [("500", "HTTP 500"), ("dies", ""), ("error", "lost the thread")],
    ids=lambda x: x or "any",
)
def test_every_request_fails(failure: str, message: str) -> None:
    with serving(failure=failure) as server:
        metrics = endpoint(server.url).run(KEY, some_jobs(4, turns=2), lambda: None).metrics()
    assert metrics.failed == metrics.requests == 4  # no second turn without a first
    assert message in (metrics.first_error or "")
    assert metrics.output_throughput == 0


def test_some_requests_fail() -> None:
    with serving(failure="some 500") as server:
        metrics = endpoint(server.url).run(KEY, some_jobs(6), lambda: None).metrics()
    assert (metrics.requests, metrics.failed) == (6, 3)
    assert metrics.total_output_tokens == 18


def test_requests_to_a_slow_server_time_out() -> None:
    with serving(wait=1.0) as server:
        metrics = endpoint(server.url, read=0.1).run(KEY, some_jobs(2), lambda: None).metrics()
    assert metrics.failed == 2
    assert "Timeout" in (metrics.first_error or "")


def test_an_unreachable_server() -> None:
    with serving() as server:
        url = server.url
        there = endpoint(url)
    with pytest.raises(UserError, match="correct `endpoint`"):
        endpoint(url)
    metrics = there.run(KEY, some_jobs(3), lambda: None).metrics()
    assert metrics.failed == 3
    assert "Connect" in (metrics.first_error or "")


def test_only_newlines_end_an_event() -> None:
    async def read() -> list[dict[str, Any]]:
        reply = httpx.Response(200, text='data: {"a": "b\u2028c"}\n\ndata: [DONE]\n')
        return [event async for event in read_events(reply)]

    assert asyncio.run(read()) == [{"a": "b\u2028c"}]


def test_urls_of_an_endpoint() -> None:
    whole = ("http://h:8/v1/chat/completions", "http://h:8/v1/models", "http://h:8/metrics")
    for url in (
        "http://h:8",
        "http://h:8/",
        "http://h:8/v1",
        "http://h:8/v1/",
        "http://h:8/v1/chat/completions",
    ):
        assert endpoint_urls(url) == whole
    assert endpoint_urls("https://h/openai/v3")[0] == "https://h/openai/v3/chat/completions"
    for bad in ("localhost:8000", "ftp://h", "http://"):
        with pytest.raises(UserError, match="write it like"):
            endpoint_urls(bad)


def test_metrics_of_several_engines_are_summed() -> None:
    text = """
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 3.0
vllm:spec_decode_num_drafts_total{engine="1"} 1e1
vllm:spec_decode_num_draft_tokens_total 26
vllm:spec_decode_num_accepted_tokens_total 9
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 7
vllm:spec_decode_num_drafts_created 1.7e9
"""
    assert parse_metrics(text) == SpecCounters(13, 26, 9, [13, 13], [7, 2])
    assert parse_metrics("vllm:other 3\n") is None
