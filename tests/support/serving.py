"""A tiny pair with a tokenizer, and servers over it: in process, or behind a real socket."""

import asyncio
import json
import socket
import threading
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
from peagle.server.engines.engine_pool import ServerEngines
from peagle.server.engines.local_backend import LocalBackend
from peagle.server.http.app import build
from peagle.server.http.backend import Backend
from peagle.server.run import Server, listen
from peagle.server.settings import ServerSettings
from tests.support.tiny_models import MASK, make_drafter, make_target

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORDS = "w6 w9 w30"
HELLO: Any = [{"role": "user", "content": WORDS}]
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
        "{% for m in messages %}{% if m['role'] == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
        "<user> {{ m['content'] }} {% endfor %}{% if more %}{{ more }}{% endif %}"
    )
    return tokenizer


@cache
def tiny_pair() -> LoadedPair:
    """A random target and drafters that agree with it now and then: a chain of the same words."""
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


def tiny_folder(root: Path) -> Path:
    """The same on disk: `target` and `p-eagle`."""
    target = make_target()
    target.model.save_pretrained(root / "target")
    word_tokenizer().save_pretrained(root / "target")
    target.name = str(root / "target")
    compact.save(make_drafter(target, "p-eagle", 2), root / "p-eagle", target)
    return root


def front_of(loader: Callable[[], LoadedPair] = tiny_pair, **changes: Any) -> LocalBackend:
    settings = replace(SETTINGS, **changes)
    return LocalBackend.of(settings, ServerEngines(settings, loader))


async def until(true: Callable[[], Any], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def client_of(front: LocalBackend, ready: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    app = build(front)
    front.engines.start()
    try:
        if ready:
            await until(lambda: front.engines.state == "ready")
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", timeout=60
        ) as client:
            yield client
    finally:
        front.engines.close()


def served(
    test: Callable[[httpx.AsyncClient, LocalBackend], Awaitable[None]],
    loader: Callable[[], LoadedPair] = tiny_pair,
    ready: bool = True,
    **changes: Any,
) -> None:
    """Runs it against a server of its own, in process; nothing is held afterwards."""

    async def main() -> None:
        front = front_of(loader, **changes)
        async with client_of(front, ready) as client:
            await test(client, front)
            await until(lambda: all_free(front))

    asyncio.run(main())


async def ask(
    client: httpx.AsyncClient, path: str = CHAT, code: int = 200, words: str = WORDS, **body: Any
) -> Any:
    """What is answered: the body, or the events of a stream."""
    given: dict[str, Any] = (
        {"messages": [{"role": "user", "content": words}]} if path == CHAT else {"prompt": words}
    )
    reply = await client.post(path, json=given | {"temperature": 0, "max_tokens": 8} | body)
    assert reply.status_code == code, reply.text
    assert reply.headers["x-request-id"]
    return events(reply.text) if body.get("stream") and code == 200 else reply.json()


@contextmanager
def on_a_thread(served: Backend) -> Iterator[tuple[Server, str]]:
    """A real server; it stops in the end."""
    here = listen("127.0.0.1", 0)
    server = Server(served)
    thread = threading.Thread(target=lambda: server.run(sockets=[here]), daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{here.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=40)
        here.close()
        assert not thread.is_alive(), "the server does not stop"


@contextmanager
def running(front: LocalBackend, ready: bool = True) -> Iterator[tuple[Server, str]]:
    with on_a_thread(front) as (server, url):
        end = time.monotonic() + 60
        while ready and front.engines.state != "ready":
            assert time.monotonic() < end, front.engines.state
            time.sleep(0.01)
        while server.loop is None:
            time.sleep(0.01)
        yield server, url


def events(text: str) -> list[dict[str, Any]]:
    """Of a whole stream; its end is checked."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def all_free(front: LocalBackend) -> bool:
    """Nobody holds a page, nobody waits."""
    for slot in front.engines.slots:
        slot.engine.check_integrity()
    return all(
        not slot.busy
        and slot.engine.loop.scheduler.pages.free == slot.engine.loop.scheduler.pages.count
        for slot in front.engines.slots
    )


@contextmanager
def slowed(front: LocalBackend, seconds: float) -> Iterator[None]:
    """Every step of the server's own engine takes so long."""
    assert front.engines.main is not None
    rounds = front.engines.main.engine.loop
    real = rounds.run

    def run() -> bool:
        time.sleep(seconds)
        return real()

    rounds.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        rounds.run = real  # type: ignore[method-assign]


def raw_request(url: str, head: str, body: bytes = b"") -> socket.socket:
    """A connection on which this was sent; for clients that do not behave."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
    return connection
