"""Large bodies, long prompts and misbehaving clients leave the server usable for other clients."""

import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models.byte_level import byte_level_folder
from tests.support.server.live_server import LiveServer, live_server
from tests.support.server.serving import CHAT, HELLO, TEXT

pytestmark = pytest.mark.abuse

MB = 1 << 20
EMOJI = "\U0001f600"
HEALTH_SECONDS = 2.0  # The machine of the tests may be busy.
SHORT = {"prompt": "the quick brown fox", "max_tokens": 4, "temperature": 0}
POST_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
LONG = {"prompt": "w6 w9", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


def repeated(start: str, item: str, end: str, size: int) -> bytes:
    """A body of `size` bytes: start, item, item ... end."""
    return (start + ",".join([item] * (size // (len(item) + 1))) + end).encode()


WRONG_BODIES = {
    "prompts": (TEXT, repeated('{"prompt": [', "{}", "]}", 3 * MB - 100)),
    "token ids": (TEXT, repeated('{"prompt": [[', "{}", "]]}", 3 * MB - 100)),
    "choices": (TEXT, repeated('{"prompt": "a", "guided_choice": [', "1", "]}", 2 * MB)),
    "messages": (CHAT, repeated('{"messages": [', "1", "]}", 2 * MB)),
    "parts": (CHAT, repeated('{"messages": [{"role": "user", "content": [', "1", "]}]}", 2 * MB)),
    "items": ("/v1/responses", repeated('{"input": [', "1", "]}", 2 * MB)),
    "short items": (
        "/v1/responses",
        repeated('{"input": [', '{"role":"user","content":"a"}', "]}", 8 * MB),
    ),
    "metadata": (
        "/v1/responses",
        json.dumps({"input": "a", "metadata": {f"a{i}": i for i in range(200_000)}}).encode(),
    ),
    "blocks": (
        "/v1/messages",
        repeated('{"max_tokens":1,"messages":[{"role":"user","content":[', "1", "]}]}", 2 * MB),
    ),
    "long texts": (
        "/v1/messages",
        repeated(
            '{"max_tokens":1,"messages":[',
            '{"role":"user","content":"' + "a" * 6000 + '"}',
            "]}",
            24 * MB,
        ),
    ),
    "ids": ("/detokenize", repeated('{"tokens": [', '"a"', "]}", 4 * MB)),
    "bias": (
        TEXT,
        json.dumps({"prompt": "a", "logit_bias": {f"a{i}": "b" for i in range(200_000)}}).encode(),
    ),
    "empty lists": (TEXT, repeated('{"prompt": "a", "x": [', "[]", "]}", 25 * MB - 100)),
    "empty objects": (TEXT, repeated('{"prompt": "a", "x": [', "{}", "]}", 25 * MB - 100)),
    "numbers": (TEXT, repeated('{"prompt": [', "1", "]}", 25 * MB - 100)),
    "one text": (TEXT, b'{"prompt": "' + b"hello " * (4 * MB) + b'"}'),
    "template arguments": (
        CHAT,
        repeated(
            '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"more": [',
            '"the quick brown fox"',
            "]}}",
            4 * MB,
        ),
    ),
}


@pytest.fixture(scope="module")
def byte_level_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose tokenizer is byte-level and whose context has 8,192 tokens."""
    return byte_level_folder(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def byte_level(byte_level_pair: Path) -> Iterator[LiveServer]:
    with live_server(byte_level_pair, "--max-batch", "8", "--kv-tokens", "16384") as running:
        yield running


def post(server: LiveServer, path: str, body: bytes) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.post(server.url + path, content=body, headers=headers, timeout=120)


@pytest.mark.parametrize("name", WRONG_BODIES)
def test_large_invalid_bodies_are_refused_quickly(byte_level: LiveServer, name: str) -> None:
    path, body = WRONG_BODIES[name]
    before = byte_level.rss_mb()
    replies: list[httpx.Response] = []
    sender = threading.Thread(target=lambda: replies.append(post(byte_level, path, body)))
    sender.start()
    slowest = peak = 0.0
    while sender.is_alive():
        slowest = max(slowest, byte_level.health_seconds())
        peak = max(peak, byte_level.rss_mb())
        time.sleep(0.01)
    assert replies[0].status_code in (400, 413), replies[0].text[:200]
    assert len(replies[0].content) < 1000
    assert slowest < HEALTH_SECONDS
    assert peak - before < 400  # MB: the body, its text and its values


def test_long_prompts_do_not_delay_another_user(byte_level: LiveServer) -> None:
    emoji = EMOJI * 1_000_000
    attacks: list[tuple[str, dict[str, Any]]] = [
        *[(TEXT, {"prompt": emoji})] * 4,
        (CHAT, {"messages": [{"role": "user", "content": emoji}]}),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"more": emoji}}),
        *[("/tokenize", {"prompt": emoji[:200_000]})] * 4,
    ]
    bodies = [(path, json.dumps(body, ensure_ascii=False).encode()) for path, body in attacks]
    assert httpx.post(byte_level.url + TEXT, json=SHORT, timeout=60).status_code == 200
    statuses: list[int] = []
    threads = [
        threading.Thread(
            target=lambda path=path, body=body: statuses.append(
                post(byte_level, path, body).status_code
            )
        )
        for path, body in bodies
    ]
    for thread in threads:
        thread.start()
    slowest = 0.0
    while any(thread.is_alive() for thread in threads):
        start = time.perf_counter()
        assert httpx.post(byte_level.url + TEXT, json=SHORT, timeout=120).status_code == 200
        slowest = max(slowest, time.perf_counter() - start)
    assert sorted(statuses) == [200] * 4 + [400] * 6
    assert slowest < 2 * HEALTH_SECONDS


def connect(server: LiveServer, data: bytes = b"", window: int | None = None) -> socket.socket:
    """A connection on which these bytes were sent; `window`: the client's receive buffer."""
    connection = socket.socket()
    if window is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(data)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Read what has arrived; return whether the server has closed the connection."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def wait_until_closed(connections: list[socket.socket], seconds: float) -> None:
    end = time.monotonic() + seconds
    open_ones = connections
    while open_ones := [connection for connection in open_ones if not is_closed(connection)]:
        assert time.monotonic() < end, f"{len(open_ones)} connections are still open"
        time.sleep(0.1)


def wait_for_descriptors(server: LiveServer, count: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while server.open_descriptors() > count:
        assert time.monotonic() < end, f"{server.open_descriptors()} descriptors, {count} expected"
        time.sleep(0.1)


def test_incomplete_requests_time_out(folder: Path) -> None:
    partial = (
        b"",
        b"G",
        b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx-a: b",
        b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\nGET /hea",
        POST_HEAD + b"content-length: 100\r\n\r\n{",
        POST_HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n{",
        b"POST /health HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{",
    )
    with live_server(folder, "--timeout", "2") as server:
        before = server.open_descriptors()
        connections = [connect(server, data) for data in partial for _ in range(10)]
        trickling = connections[20:30]
        end = time.monotonic() + 15
        while time.monotonic() < end and any(not is_closed(one) for one in trickling):
            for connection in trickling:
                with suppress(OSError):
                    connection.sendall(b"c")
            time.sleep(0.2)
        wait_until_closed(connections, 15)
        wait_for_descriptors(server, before, 10)
        assert server.health_seconds() < HEALTH_SECONDS


UNREAD = {
    "stream": (TEXT, {"prompt": "a", "max_tokens": 4000, "n": 4, "logprobs": 20, "stream": True}),
    "whole": ("/tokenize", {"prompt": "x" * 600_000, "return_token_strs": True}),
}


@pytest.mark.parametrize("name", UNREAD)
def test_clients_that_never_read_are_disconnected(byte_level_pair: Path, name: str) -> None:
    """The answers exceed the socket buffers of the kernel (4 MB and more)."""
    path, request = UNREAD[name]
    body = json.dumps(request | {"ignore_eos": True}).encode()
    head = b"POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\n" % path.encode()
    head += b"content-length: %d\r\n\r\n" % len(body)
    with live_server(byte_level_pair, "--timeout", "10", "--kv-tokens", "32768") as server:
        assert httpx.post(server.url + TEXT, json=SHORT, timeout=60).status_code == 200
        before = server.open_descriptors()
        memory = server.rss_mb()
        stalled = [connect(server, head + body, window=4096) for _ in range(3)]
        time.sleep(1)
        assert httpx.post(server.url + TEXT, json=SHORT, timeout=60).status_code == 200
        wait_for_descriptors(server, before, 60)
        assert server.rss_mb() - memory < 300
        for connection in stalled:
            connection.close()
        assert httpx.post(server.url + TEXT, json=SHORT, timeout=60).status_code == 200


@pytest.mark.parametrize("descriptors", [None, 600])
def test_a_thousand_idle_connections_do_not_block_others(
    folder: Path, descriptors: int | None
) -> None:
    """The server also works if its limit of file descriptors is lower."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with live_server(folder, descriptors=descriptors) as server:
        assert httpx.post(server.url + TEXT, json=SHORT, timeout=60).status_code == 200
        memory = server.rss_mb()
        idle = []
        slowest = 0.0
        for number in range(1000):
            idle.append(connect(server, b"" if number % 2 else b"GET /health HTTP/1.1\r\nx-a: b"))
            if number % 100 == 99:
                slowest = max(slowest, server.health_seconds())
        start = time.perf_counter()
        assert httpx.post(server.url + TEXT, json=SHORT, timeout=60).status_code == 200
        assert time.perf_counter() - start < HEALTH_SECONDS and slowest < HEALTH_SECONDS
        assert server.rss_mb() - memory < 100
        assert server.open_descriptors() <= (descriptors or 2000)
        for connection in idle:
            connection.close()
        assert not any("traceback" in line for line in server.log)
