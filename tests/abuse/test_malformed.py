"""Bodies that are not requests get a 4xx answer, and the server keeps answering."""

import httpx
import pytest

from tests.support.server.live_server import LiveServer
from tests.support.server.serving import CHAT, HELLO, TEXT

pytestmark = pytest.mark.abuse

BODIES = (
    b"",
    b"null",
    b"[]",
    b"{",
    b'{"messages": null}',
    b'{"messages": [[[[]]]]}',
    b"\xff\xfe\x00",
    b'{"prompt": 1e999}',
    b'{"prompt": "w6", "max_tokens": -1}',
    b'{"prompt": "w6", "n": 100000}',
    b'{"prompt": "w6", "temperature": NaN}',
    b"[" * 100_000,
    b'{"prompt": "w6", "stop": ' + b'["' + b"w" * 1_000_000 + b'"]}',
)


def test_malformed_bodies_get_a_4xx_answer(server: LiveServer) -> None:
    for path in (CHAT, TEXT, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"):
        for body in BODIES:
            headers = {"content-type": "application/json"}
            reply = httpx.post(server.url + path, content=body, headers=headers, timeout=30)
            assert 400 <= reply.status_code < 500, (path, body[:60], reply.text[:200])
            assert "error" in reply.json(), body[:60]
    reply = httpx.post(server.url + CHAT, json={"messages": HELLO, "max_tokens": 3}, timeout=30)
    assert reply.status_code == 200
