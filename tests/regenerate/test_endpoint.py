"""Answers from an OpenAI-compatible endpoint: retries, errors, and the time limit."""

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from peagle.errors import UserError
from peagle.regenerate import endpoint
from peagle.regenerate.answers import Counts
from peagle.regenerate.job import RegenerateSettings, regenerate
from peagle.regenerate.prompts import Prompt
from peagle.target import Target
from tests.regenerate.test_regenerate import lines, some
from tests.support.models.chat_targets import make_chat_target


@pytest.fixture(scope="module")
def chat() -> Target:
    return make_chat_target()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    """A server that echoes the last message, after one error 429 and one 503."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.server.requests.append((self.path, self.headers.get("authorization"), request))
            text = request["messages"][-1]["content"]
            self.server.hang.wait(30 * (text in self.server.slow))
            status = self.server.errors.pop(0) if self.server.errors else 200
            choice = {
                "message": {"content": text},
                "finish_reason": "length" if text == "w9" else "stop",
            }
            body = json.dumps(
                {"choices": [choice]} if status == 200 else {"error": "busy"}
            ).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.errors = [], [429, 503]
    server.slow, server.hang = set(), threading.Event()  # Messages in `slow` wait for the event.
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.01)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    yield server
    server.hang.set()
    server.shutdown()
    server.server_close()


def ask(
    chat: Target,
    server: ThreadingHTTPServer,
    prompts: list[Prompt],
    out: Path,
    stop_after: float = math.inf,
) -> Counts:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    return regenerate(
        chat,
        prompts,
        out,
        RegenerateSettings(max_tokens=24, max_prompt=60, endpoint=url, model="served"),
        stop_after=stop_after,
    )


def test_an_endpoint_answers(chat: Target, server: ThreadingHTTPServer, tmp_path: Path) -> None:
    prompts = [
        *some(turns=2, count=5),
        Prompt("t@0", "", ["w9"], 0.7),
        Prompt("m@0", "", ["w66"], 0.0),
    ]
    counts = ask(chat, server, prompts, tmp_path)
    assert counts.answered == 5 and dict(counts.dropped) == {"truncated": 1, "template": 1}
    assert len(server.requests) == 2 * 5 + 1 + 2  # two retries: for 429 and for 503
    path, key, body = server.requests[-1]
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert body["model"] == "served" and body["max_tokens"] == 24
    line = next(line for line in lines(tmp_path) if line["key"] == "1@0")
    assert [message["content"] for message in line["messages"]] == [
        "w4 w41",
        "w4 w41",
        "w4 w48",
        "w4 w48",
    ]
    assert [line["ids"][start:end] for start, end in line["spans"]] == [[4, 41, 1], [4, 48, 1]]
    assert ask(chat, server, prompts, tmp_path).resumed == 7


def test_errors_of_an_endpoint(chat: Target, server: ThreadingHTTPServer, tmp_path: Path) -> None:
    server.errors[:] = [401] * 10
    with pytest.raises(UserError, match="refuses: HTTP 401"):
        ask(chat, server, some(count=3), tmp_path / "a")
    server.errors[:] = [503] * 50
    with pytest.raises(UserError, match=f"in {endpoint.MAX_TRIES} tries, the last: HTTP 503"):
        ask(chat, server, some(count=3), tmp_path / "b")
    server.errors.clear()
    assert ask(chat, server, some(count=3), tmp_path / "b").answered == 3


@pytest.mark.slow
def test_the_time_limit_ends_requests(
    chat: Target, server: ThreadingHTTPServer, tmp_path: Path
) -> None:
    """Answered turns are kept; the next run sends the other turns again."""
    prompts = some(turns=2, count=3)
    server.errors.clear()
    server.slow = {prompts[1].turns[1], prompts[2].turns[0]}
    counts = ask(chat, server, prompts, tmp_path, stop_after=8)
    assert counts.answered == 2 and not counts.dropped and counts.seconds < 60
    cut = {line["key"]: (line.get("cut"), len(line["messages"])) for line in lines(tmp_path)}
    assert cut == {prompts[0].key: (None, 4), prompts[1].key: ("time", 2)}
    server.hang.set()
    again = ask(chat, server, prompts, tmp_path)
    assert (again.answered, again.resumed) == (1, 2)
    count = len(server.requests)
    assert ask(chat, server, some(count=5), tmp_path / "none", stop_after=-1).answered == 0
    assert len(server.requests) == count, "no request may be sent after the time limit"
