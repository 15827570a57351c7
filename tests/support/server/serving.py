"""A tiny pair with a tokenizer, and servers for it, in process or on a real socket."""

import asyncio
import http.client
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle.catalog.pair import DrafterSource, Pair, TargetSource
from peagle.core import Method
from peagle.drafter.formats import compact
from peagle.loaded import LoadedPair
from peagle.server.engines.engine_pool import MAX_EXTRA_ENGINES
from peagle.server.front import engine_client
from peagle.server.front.engine_backend import EngineBackend
from peagle.server.http.app import build_app
from peagle.server.routes import create_engine_backend
from peagle.server.settings import ServerSettings
from peagle.server.web_server import Server
from tests.support.models.tiny_models import MASK, make_drafter, make_target
from tests.support.server.server_thread import on_a_thread
from tests.support.server.thread_engines import ThreadEngines

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
WORDS = "w6 w9 w30"
HELLO: Any = [{"role": "user", "content": WORDS}]
# Wait for current metrics and statuses, however long an engine takes.
engine_client.STATUS_WAIT_SECONDS = 60.0
SETTINGS = ServerSettings(
    pair="tiny",
    port=0,
    method="p-eagle",
    k=3,
    max_batch=8,
    kv_tokens=4096,
    timeout=60,
    drain_seconds=5,
    backoff=0.05,
)


def word_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {f"w{i}": i for i in range(94) if i != MASK} | {"<user>": 94, "<unk>": 95}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="w1")
    tokenizer.chat_template = (
        "{% for m in messages %}"
        "{% if m['role'] == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
        "<user> {{ m['content'] }} {% endfor %}{% if more %}{{ more }}{% endif %}"
    )
    return tokenizer


@cache
def tiny_pair() -> LoadedPair:
    """A random target, and drafters whose drafts it accepts sometimes."""
    target = make_target()
    target.tokenizer = word_tokenizer()
    drafters: dict[Method, Any] = {
        "p-eagle": make_drafter(target, "p-eagle", 2),
        "eagle3": make_drafter(target, "eagle3", 1),
    }
    pair = Pair(
        "tiny", TargetSource(order=("folder",)), {method: DrafterSource() for method in drafters}
    )
    return LoadedPair(pair, target, drafters)


def tiny_folder(root: Path, **overrides: int) -> Path:
    """The same pair on disk: `target` and `p-eagle`; `overrides` of the target's config."""
    target = make_target("llama", 0, **overrides)
    target.model.save_pretrained(root / "target")
    word_tokenizer().save_pretrained(root / "target")
    target.name = str(root / "target")
    compact.save(make_drafter(target, "p-eagle", 2), root / "p-eagle", target)
    return root


def make_backend(
    loader: Callable[[], LoadedPair] = tiny_pair,
    max_extra: int = MAX_EXTRA_ENGINES,
    **changes: Any,
) -> EngineBackend:
    """A backend for the tiny pair; `changes` to SETTINGS."""
    settings = replace(SETTINGS, **changes)
    return create_engine_backend(settings, ThreadEngines(settings, loader, max_extra))


async def until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """Wait until the condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def client_of(backend: EngineBackend, ready: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server in this process."""
    app = build_app(backend)
    backend.engines.start()
    try:
        if ready:
            await until(lambda: backend.engines.state == "ready")
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", timeout=60
        ) as client:
            yield client
    finally:
        await backend.engines.close()


def served(
    test: Callable[[httpx.AsyncClient, EngineBackend], Awaitable[None]],
    loader: Callable[[], LoadedPair] = tiny_pair,
    ready: bool = True,
    **changes: Any,
) -> None:
    """Run a test against a new server in this process; check that no request or page remains."""

    async def main() -> None:
        backend = make_backend(loader, **changes)
        async with client_of(backend, ready) as client:
            await test(client, backend)
            await until(lambda: all_idle(backend))

    asyncio.run(main())


async def ask(
    client: httpx.AsyncClient, path: str = CHAT, code: int = 200, words: str = WORDS, **body: Any
) -> Any:
    """Send a request. Returns the body of the response, or the events of a stream."""
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": words}]} if path == CHAT else {"prompt": words}
    )
    response = await client.post(path, json=prompt | {"temperature": 0, "max_tokens": 8} | body)
    assert response.status_code == code, response.text
    assert response.headers["x-request-id"]
    if body.get("stream") and code == 200:
        return events(response.text)
    return response.json()


@contextmanager
def running(backend: EngineBackend, ready: bool = True) -> Iterator[tuple[Server, str]]:
    with on_a_thread(backend) as (server, url):
        end = time.monotonic() + 60
        while ready and backend.engines.state != "ready":
            assert time.monotonic() < end, backend.engines.state
            time.sleep(0.01)
        while server.loop is None:
            time.sleep(0.01)
        yield server, url


def events(text: str) -> list[dict[str, Any]]:
    """The events of a complete stream, without the final [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def all_idle(backend: EngineBackend) -> bool:
    """Whether no engine has a live request or a used KV page."""
    slots = thread_engines(backend).slots
    for slot in slots:
        slot.engine.check_integrity()
    return all(slot.engine.idle for slot in slots)


def thread_engines(backend: EngineBackend) -> ThreadEngines:
    assert isinstance(backend.engines, ThreadEngines)
    return backend.engines


@contextmanager
def paused(backend: EngineBackend) -> Iterator[None]:
    """The main engine accepts requests, but runs no steps."""
    main = thread_engines(backend).main
    assert main is not None
    loop = main.engine.loop
    run_step = loop.run

    def wait() -> bool:
        time.sleep(0.01)
        return True

    loop.run = wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        loop.run = run_step  # type: ignore[method-assign]


@contextmanager
def slowed(backend: EngineBackend, seconds: float) -> Iterator[None]:
    """Delay every step of the main engine."""
    main = thread_engines(backend).main
    assert main is not None
    loop = main.engine.loop
    run_step = loop.run

    def run() -> bool:
        time.sleep(seconds)
        return run_step()

    loop.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        loop.run = run_step  # type: ignore[method-assign]


def raw_request(url: str, head: str, body: bytes = b"") -> socket.socket:
    """A connection on which these bytes were sent, for misbehaving clients."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
    return connection


def read_reply(connection: socket.socket) -> tuple[int, bytes]:
    """The status and the body of one complete reply."""
    with http.client.HTTPResponse(connection) as reply:
        reply.begin()
        return reply.status, reply.read()
