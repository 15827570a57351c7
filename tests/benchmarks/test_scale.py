"""benchmarks/server/scale.py: requests that are counted as lost when a replica is killed."""

import json
from pathlib import Path

import pytest

from benchmarks.server.deployments import Replicas
from benchmarks.server.scale import Load, Request, stream_tokens, summarize


def load_of(*requests: Request) -> Load:
    load = Load("http://nowhere", users=4, tokens=8)
    load.requests = list(requests)
    return load


def test_lost_requests_are_counted_by_replica() -> None:
    load = load_of(
        Request("before", True, 0.0, 1.0, "HTTP 500"),
        Request("on it", True, 9.0, 10.5, "error in the stream"),
        Request("elsewhere", False, 9.0, 11.0, "HTTP 500"),
        Request("saved", False, 9.5, 14.0),
        Request("refused", False, 10.2, 10.3, "HTTP 503"),
        Request("later", True, 15.0, 17.0),
    )
    summary = summarize(load, killed=10.0, recovery=6.0, on_victim={"on it", "saved"})
    assert summary["in_flight_at_kill"] == 3
    assert summary["on_the_killed"] == 2
    assert summary["lost_beyond_those_on_it"] == 1
    assert (summary["lost_streams"], summary["lost_whole"]) == (1, 1)
    assert (summary["failed_before"], summary["failed_after"], summary["answered"]) == (1, 1, 2)
    assert (summary["told_within_s"], summary["longest_gap_s"]) == (1.0, 4.0)
    # The ids of requests on the killed replica may be unknown: then only their number is given.
    assert summarize(load, 10.0, 6.0, on_victim=1)["lost_beyond_those_on_it"] == 1


def test_an_incomplete_stream_is_an_error() -> None:
    chunk = {"usage": {"completion_tokens": 8}}
    assert stream_tokens(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n") == 8
    for text, words in {
        f"data: {json.dumps(chunk)}\n\n": "broke off",
        'data: {"error": {"message": "gone"}}\n\ndata: [DONE]\n\n': "gone",
        "": "broke off",
    }.items():
        with pytest.raises(RuntimeError, match=words):
            stream_tokens(text)


def test_the_gateway_log_names_the_replica_of_a_request(tmp_path: Path) -> None:
    def line(id: str, worker: str) -> str:
        return json.dumps({"event": "request", "request_id": id, "worker": worker}) + "\n"

    replicas = Replicas("python")
    lines = [line("a", "replica-0"), line("b", "replica-1"), line("c", "replica-0")]
    replicas.log = tmp_path / "log"
    replicas.log.write_text("".join([*lines, line("other", "replica-0")]))
    assert replicas.requests_on("replica-0", {"a", "b", "c"}) == {"a", "c"}
    assert replicas.requests_on("replica-1", {"a", "b"}) == {"b"}
