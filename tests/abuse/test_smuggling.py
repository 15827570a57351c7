"""Requests whose end is ambiguous are refused, and what follows them is never read as a request."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server.live_server import LiveServer, live_server
from tests.support.server.raw_http import exchange

pytestmark = pytest.mark.abuse

KEY = b"authorization: Bearer secret\r\n"
SECOND = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n" + KEY + b"\r\n"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n" + KEY
BODY = b'{"prompt":"w6","max_tokens":1}'
LENGTH = b"%d" % len(BODY)
CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)
HEALTH = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n"


def with_length(value: bytes) -> bytes:
    return HEAD + b"content-length: " + value + b"\r\n\r\n" + BODY


def with_encoding(value: bytes, chunks: bytes = CHUNK + b"0\r\n\r\n") -> bytes:
    return HEAD + b"transfer-encoding: " + value + b"\r\n\r\n" + chunks


def with_chunk(size: bytes) -> bytes:
    return with_encoding(b"chunked", size + BODY + b"\r\n0\r\n\r\n")


def with_headers(headers: bytes, body: bytes = BODY) -> bytes:
    return HEAD + headers + b"\r\n" + body


VALID = {
    "length": with_length(LENGTH),
    "chunks": with_encoding(b"chunked"),
    "upper case": with_encoding(b"CHUNKED"),
    "chunk extension": with_chunk(b"1e;a=b\r\n"),
}
AMBIGUOUS = {
    "length and encoding": with_headers(
        b"content-length: 30\r\ntransfer-encoding: chunked\r\n", CHUNK + b"0\r\n\r\n"
    ),
    "encoding and length": with_headers(
        b"transfer-encoding: chunked\r\ncontent-length: 5\r\n", CHUNK + b"0\r\n\r\n"
    ),
    "two lengths": with_headers(b"content-length: 30\r\ncontent-length: 5\r\n"),
    "the same length twice": with_headers(b"content-length: 30\r\ncontent-length: 30\r\n"),
    "list of lengths": with_length(b"30, 30"),
    "plus": with_length(b"+30"),
    "negative": with_length(b"-1"),
    "hexadecimal": with_length(b"0x1e"),
    "space inside": with_length(b"3 0"),
    "float": with_length(b"30.0"),
    "overflow": with_length(b"9" * 24),
    "empty length": with_length(b""),
    "underscore": with_length(b"3_0"),
    "arabic digits": with_length("٣٠".encode()),
    "unknown encoding": with_encoding(b"xchunked"),
    "identity": with_encoding(b"identity"),
    "chunked is not last": with_encoding(b"chunked, identity"),
    "chunked twice": with_encoding(b"chunked, chunked"),
    "vertical tab": with_encoding(b"\x0bchunked"),
    "quotes": with_encoding(b'"chunked"'),
    "null in the encoding": with_encoding(b"chunked\x00"),
    "space before the colon": with_headers(b"transfer-encoding : chunked\r\n", CHUNK),
    "space before the name": with_headers(b" transfer-encoding: chunked\r\n", CHUNK),
    "folded line": with_headers(b"x-a: b\r\n transfer-encoding: chunked\r\n", CHUNK),
    "bare line feeds": with_length(LENGTH).replace(b"\r\n", b"\n"),
    "bare carriage return": with_headers(b"x-a: b\rcontent-length: 30\r\n"),
    "line feed in a value": with_headers(b"x-a: b\ncontent-length: 0\r\ncontent-length: 30\r\n"),
    "null in a value": with_headers(b"x-a: b\x00c\r\ncontent-length: 30\r\n"),
    "chunk size 0x": with_chunk(b"0x1e\r\n"),
    "negative chunk": with_chunk(b"-1e\r\n"),
    "chunk size plus": with_chunk(b"+1e\r\n"),
    "huge chunk": with_chunk(b"f" * 20 + b"\r\n"),
    "chunk size that wraps": with_chunk(b"1000000000000001e\r\n"),
    "space after the chunk size": with_chunk(b"1e \r\n"),
    "chunk ends with a line feed": with_chunk(b"1e\n"),
    "line feed in an extension": with_chunk(b"1e;a\nb\r\n"),
    "no end of a chunk": with_encoding(b"chunked", b"1e\r\n" + BODY + b"0\r\n\r\n"),
    "short chunk": with_chunk(b"5\r\n"),
    "CONNECT": b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}
# The bytes after these requests are a body, or belong to a protocol that is not supported.
ONE_REQUEST = {
    "GET with a body": HEALTH + b"content-length: %d\r\n\r\n" % len(SECOND),
    "HTTP/1.0 with chunks": with_encoding(b"chunked").replace(b"HTTP/1.1", b"HTTP/1.0"),
    "h2c": HEALTH
    + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n\r\n",
    "websocket": HEALTH + b"connection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
}


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[LiveServer]:
    with live_server(folder, "--api-key", "secret") as running:
        yield running


@pytest.mark.parametrize("name", VALID)
def test_two_valid_requests_on_one_connection_are_answered(guarded: LiveServer, name: str) -> None:
    reply = exchange(guarded.port, VALID[name] + SECOND)
    assert reply.statuses == [200, 200] and reply.lists_models and not reply.closed


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_requests_are_refused(guarded: LiveServer, name: str) -> None:
    reply = exchange(guarded.port, AMBIGUOUS[name] + SECOND)
    assert reply.statuses == [400] and reply.closed and not reply.lists_models
    assert guarded.health_seconds() < 20


@pytest.mark.parametrize("name", ONE_REQUEST)
def test_bytes_after_the_request_are_not_a_second_request(guarded: LiveServer, name: str) -> None:
    reply = exchange(guarded.port, ONE_REQUEST[name] + SECOND)
    assert reply.statuses == [200] and not reply.lists_models


def test_every_request_on_a_connection_needs_the_key(guarded: LiveServer) -> None:
    """The key of the first request on a connection does not authorize the next one."""
    reply = exchange(guarded.port, with_length(LENGTH) + SECOND.replace(KEY, b""))
    assert reply.statuses == [200, 401] and not reply.lists_models
