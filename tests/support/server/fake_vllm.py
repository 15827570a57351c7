"""A server that answers like vLLM, with or without a drafter, for the tests of `peagle verify`."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = 12
DRAFTS = 4  # drafts for each answer, of 3 tokens each


@dataclass(frozen=True)
class FakeModel:
    """The model of the server, and the facts that it reports."""

    owner: str = "vllm"
    drafter: bool = True
    accepted: int = 8  # tokens of each answer
    metrics: bool = True  # GET /metrics
    request_metrics: bool = False  # whether every answer contains metrics
    word: str = "yes"  # repeated in the answer
    key: str | None = None
    failure: str = ""
    counters_step: int = 1  # -1: counters decrease, as if every page came from another replica

    @property
    def spec(self) -> dict[str, int]:
        return {
            "num_spec_steps": DRAFTS,
            "num_draft_tokens": 3 * DRAFTS,
            "num_accepted_draft_tokens": self.accepted,
        }


class FakeVllm(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, model: FakeModel) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model = model
        self.asked: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def metrics_page(self) -> str:
        """Counters start above zero, as if other requests came before: only differences matter."""
        lines = [f'vllm:generation_tokens_total{{engine="0"}} {WORDS * len(self.asked)}.0']
        counts = {
            "drafts": DRAFTS,
            "draft_tokens": 3 * DRAFTS,
            "accepted_tokens": self.model.accepted,
        }
        for name, count in counts.items() if self.model.drafter else ():
            value = 1000 + self.model.counters_step * count * len(self.asked)
            lines.append(f'vllm:spec_decode_num_{name}_total{{engine="0"}} {value}.0')
        return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    server: FakeVllm

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        model = self.server.model
        if model.key and self.headers.get("Authorization") != f"Bearer {model.key}":
            return self.reply(401, '{"error": "Unauthorized"}')
        if self.path == "/v1/models":
            return self.reply(200, json.dumps({"data": [{"id": "m", "owned_by": model.owner}]}))
        if self.path == "/metrics" and model.metrics:
            return self.reply(200, self.server.metrics_page())
        return self.reply(404, "not found")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        model = self.server.model
        if model.failure == "500":
            return self.reply(500, '{"error": {"message": "engine dead"}}')
        if model.failure == "not JSON":
            return self.reply(200, "<html>", "text/html")
        if model.failure == "redirect":
            return self.reply(301, "")
        usage: dict[str, Any] = {"usage": {"completion_tokens": WORDS}}
        if model.request_metrics and model.drafter:
            usage["metrics"] = {"speculative_decoding": model.spec}
        text = [f"{model.word} "] * WORDS
        events = [
            *(
                {"choices": [{"delta": {"content": "".join(text[i : i + 3])}}]}
                for i in (0, 3, 6, 9)
            ),
            {"choices": [], **usage},
        ]
        lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events]
        end = [] if model.failure == "broken stream" else ["data: [DONE]\n\n"]
        return self.reply(200, "".join([*lines, *end]), "text/event-stream")

    def reply(self, code: int, text: str, kind: str = "application/json") -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        if code == 301:
            self.send_header("Location", "https://elsewhere/v1/chat/completions")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def fake_vllm(**changes: Any) -> Iterator[FakeVllm]:
    server = FakeVllm(FakeModel(**changes))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
