"""No spelling of a path, a method or a header reaches a protected route without the key."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server.live_server import LiveServer, live_server
from tests.support.server.raw_http import RawReply, exchange

pytestmark = pytest.mark.abuse

PATHS = (
    "/v1/models",
    "/v1/models/",
    "//v1/models",
    "/./v1/models",
    "/v1/./models",
    "/v1//models",
    "/V1/MODELS",
    "/%76%31/models",
    "/v1%2fmodels",
    "/v1/models%00",
    "/v1/models%0d%0a",
    "/v1/models?/health",
    "/v1/models?a=/page/",
    "/v1/models#/health",
    "/v1/models;/health",
    "/health/../v1/models",
    "/health/..%2fv1/models",
    "/health/%2e%2e/v1/models",
    "/health;/../v1/models",
    "/health%2f..%2fv1%2fmodels",
    "/page/../v1/models",
    "/page/%2e%2e/v1/models",
    "/page/..%2fv1%2fmodels",
    "/page/..;/v1/models",
    "/page//v1/models",
    "/page/%252e%252e/v1/models",
    "/metrics/../v1/models",
    "/\\v1\\models",
    "http://127.0.0.1/v1/models",
    "http://127.0.0.1/page/../v1/models",
    "http://evil.example/v1/models",
)
FILES = (
    "/page/../run.py",
    "/page/../../settings.py",
    "/page/%2e%2e/run.py",
    "/page/%2e%2e%2frun.py",
    "/page/..%2f..%2fsettings.py",
    "/page/..%5crun.py",
    "/page/....//run.py",
    "/page//etc/passwd",
    "/page/%2fetc%2fpasswd",
    "/page/index.html/../../run.py",
    "/page/%c0%ae%c0%ae/run.py",
    "/page/app.js%00.py",
)
HEADERS = (
    "authorization:",
    "authorization: Bearer",
    "authorization: Bearer ",
    "authorization: secret",
    "authorization: Basic secret",
    "authorization: Basic c2VjcmV0OnNlY3JldA==",
    "authorization: Token secret",
    "authorization: Bearer secre",
    "authorization: Bearer secrets",
    "authorization: Bearer SECRET",
    "authorization: Bearer secret,secret",
    "authorization: Bearer secret secret",
    "authorization: Bearer wrong\r\nauthorization: Bearer secret",
    "proxy-authorization: Bearer secret",
    "x-api-key: secrets",
    "x-api-key: Bearer secret",
    "x-api-key:",
    "api-key: secret",
    "cookie: authorization=Bearer secret",
    "x-original-url: /health",
    "x-rewrite-url: /health",
    "x-forwarded-path: /health",
    "x-forwarded-prefix: /page/",
    "x-forwarded-for: 127.0.0.1",
    "x-http-method-override: HEAD",
)
METHODS = ("HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "POST", "get", "GETS")
FOREIGN = (
    "host: 127.0.0.1\r\norigin: http://evil.example",
    "host: 127.0.0.1\r\norigin: null",
    "host: 127.0.0.1\r\norigin: http://127.0.0.1.evil.example",
    "host: 127.0.0.1\r\norigin: http://evil.example?127.0.0.1",
    "host: 127.0.0.1\r\norigin:",
    "host: evil.example",
    "host: evil.example\r\norigin: http://evil.example",
    "host: 127.0.0.1.evil.example",
    "host: localhost.evil.example",
    "host: evil.example:80",
    "host: user@evil.example",
)


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[LiveServer]:
    with live_server(folder, "--api-key", "secret") as running:
        yield running


@pytest.fixture(scope="module")
def keyless(folder: Path) -> Iterator[LiveServer]:
    with live_server(folder) as running:
        yield running


def request(
    server: LiveServer, path: str, headers: str = "host: 127.0.0.1", method: str = "GET"
) -> RawReply:
    head = f"{method} {path} HTTP/1.1\r\n{headers}\r\nconnection: close\r\n\r\n"
    return exchange(server.port, head.encode("latin-1"))


def test_the_key_gives_access(guarded: LiveServer) -> None:
    headers = "host: 127.0.0.1\r\nauthorization: Bearer secret"
    reply = request(guarded, "/v1/models", headers)
    assert reply.statuses == [200] and reply.lists_models


@pytest.mark.parametrize("path", PATHS)
def test_no_path_lists_models_without_the_key(guarded: LiveServer, path: str) -> None:
    reply = request(guarded, path)
    assert reply.statuses[0] in (400, 401, 404) and not reply.lists_models


@pytest.mark.parametrize("path", FILES)
def test_files_outside_the_page_are_not_served(guarded: LiveServer, path: str) -> None:
    reply = request(guarded, path)
    assert reply.statuses[0] in (400, 401, 404)
    assert b"import " not in reply.data and b"root:" not in reply.data


@pytest.mark.parametrize("header", HEADERS)
def test_no_header_replaces_the_key(guarded: LiveServer, header: str) -> None:
    reply = request(guarded, "/v1/models", f"host: 127.0.0.1\r\n{header}")
    assert reply.statuses[0] == 401 and not reply.lists_models


@pytest.mark.parametrize("method", METHODS)
def test_no_method_lists_models_without_the_key(guarded: LiveServer, method: str) -> None:
    reply = request(guarded, "/v1/models", method=method)
    assert reply.statuses[0] in (400, 401) and not reply.lists_models


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/invocations", "/tokenize"]
)
def test_a_body_is_not_read_without_the_key(guarded: LiveServer, path: str) -> None:
    """The server answers before it reads the body, so a client without a key cannot fill memory."""
    reply = request(guarded, path, "host: 127.0.0.1\r\ncontent-length: 20000000", "POST")
    assert reply.statuses == [401]


@pytest.mark.parametrize("headers", FOREIGN)
def test_requests_of_other_origins_are_refused(keyless: LiveServer, headers: str) -> None:
    assert request(keyless, "/v1/models").lists_models
    reply = request(keyless, "/v1/models", headers)
    assert reply.statuses[0] == 403 and not reply.lists_models
