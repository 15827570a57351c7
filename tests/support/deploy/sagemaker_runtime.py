"""SageMaker's runtime as a local server: whole responses, and its binary event stream."""

import json
import struct
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.support.deploy.aws import CREDENTIALS


def frame(payload: bytes, **headers: str) -> bytes:
    """AWS's binary event stream: lengths, their CRC, headers (7: text), payload, CRC of all."""
    coded = b"".join(
        bytes([len(name)])
        + name.encode()
        + b"\x07"
        + struct.pack(">H", len(value))
        + value.encode()
        for name, value in ((f":{key.replace('_', '-')}", value) for key, value in headers.items())
    )
    lengths = struct.pack(">II", 16 + len(coded) + len(payload), len(coded))
    message = lengths + struct.pack(">I", zlib.crc32(lengths)) + coded + payload
    return message + struct.pack(">I", zlib.crc32(message))


def part(data: bytes) -> bytes:
    return frame(
        data,
        message_type="event",
        event_type="PayloadPart",
        content_type="application/octet-stream",
    )


def broken(message: str) -> bytes:
    body = json.dumps({"Message": message, "ErrorCode": "ModelInvocationTimeExceeded"}).encode()
    return frame(
        body,
        message_type="exception",
        exception_type="ModelStreamError",
        content_type="application/json",
    )


class Runtime(ThreadingHTTPServer):
    """A runtime that answers every request with the same frames or container error."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.status = 200
        self.body = b""
        self.asked: list[tuple[str, dict[str, Any]]] = []
        super().__init__(("127.0.0.1", 0), Handler)

    def answer(self, accepted: int | None = None) -> None:
        """Stream two chunks; with `accepted`, the metrics of 4 drafts of 5 tokens."""
        end: dict[str, Any] = {"choices": [], "usage": {"completion_tokens": 6}}
        if accepted is not None:
            counts = {"num_spec_steps": 4, "num_draft_tokens": 20}
            end["metrics"] = {
                "speculative_decoding": counts | {"num_accepted_draft_tokens": accepted}
            }
        events = [{"choices": [{"delta": {"content": "a b c"}}]}] * 2 + [end]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        self.frames = [part(f"{text}data: [DONE]\n\n".encode())]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Runtime

    def do_POST(self) -> None:
        self.server.asked.append(
            (self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        )
        stream = self.path.endswith("invocations-response-stream") and self.server.status == 200
        self.send_response(self.server.status)
        self.send_header(
            "Content-Type", "application/vnd.amazon.eventstream" if stream else "application/json"
        )
        if self.server.status != 200:
            self.send_header("x-amzn-ErrorType", "ModelError")
        if not stream:
            self.send_header("Content-Length", str(len(self.server.body)))
            self.end_headers()
            self.wfile.write(self.server.body)
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for data in self.server.frames:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with Runtime() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv(
            "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", f"http://127.0.0.1:{server.server_port}"
        )
        yield server
        server.shutdown()
