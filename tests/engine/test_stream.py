"""Streams of answers for threads and asyncio: pieces, aborts, and failures of the engine."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from peagle.core import Step
from peagle.engine import Engine, EngineConfig
from peagle.engine.stream import RequestFailed, Stream, StreamPiece
from peagle.errors import UserError
from tests.support.engine.engines import (
    TIGHT,
    engine_of,
    reference_steps,
    small,
    some_requests,
    steps_of,
)

REQUESTS = some_requests(10, seed=21, max_tokens=12)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(small(), EngineConfig(method="p-eagle", k=3, **TIGHT)) as engine:
        yield engine
    engine.check_integrity()


@pytest.fixture(scope="module")
def expected() -> list[list[Step]]:
    return [reference_steps(small(), "p-eagle", ids, **options) for ids, options in REQUESTS]


def within(coroutine: Any, seconds: float = 60) -> Any:
    async def run() -> Any:
        return await asyncio.wait_for(coroutine, seconds)

    return asyncio.run(run())


def test_threads(engine: Engine, expected) -> None:
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        answers = [
            pool.submit(lambda ids, options: steps_of(engine.add(ids, **options)), *requests)
            for requests in REQUESTS
        ]
        assert [answer.result(timeout=60) for answer in answers] == expected


async def collect(stream: Stream) -> list[StreamPiece]:
    return [piece async for piece in stream]


def test_asyncio(engine: Engine, expected) -> None:
    async def collect_all() -> list[list[StreamPiece]]:
        return await asyncio.gather(
            *(collect(engine.add(ids, **options)) for ids, options in REQUESTS)
        )

    answers = within(collect_all())
    assert [[piece.step for piece in pieces if piece.step] for pieces in answers] == expected
    assert all(
        pieces[-1].reason in ("stop", "length") and pieces[-1].step is None for pieces in answers
    )


def test_one_piece_per_step(prompt) -> None:
    engine = engine_of(small(), "p-eagle")
    stream = engine.add(prompt(13), max_tokens=12, ignore_eos=True)
    assert stream.prompt_tokens == 13 and stream.poll() == []
    engine.step()
    [piece] = stream.poll()
    assert (
        piece.step is not None
        and len(piece.step.tokens) == 1
        and (piece.step.drafted, piece.reason) == (0, None)
    )
    engine.drain()
    *pieces, last = stream.poll()
    assert [piece.step.drafted for piece in pieces if piece.step] == [3] * len(pieces)
    assert all(
        len(piece.step.tokens) == piece.step.accepted + 1 for piece in pieces[:-1] if piece.step
    )
    assert (last.step, last.reason, stream.ended, list(stream)) == (None, "length", True, [])


def test_abort_in_the_middle_and_while_waiting(expected) -> None:
    engine = engine_of(small(), "p-eagle", max_batch=1)
    first, second, third = (engine.add(*REQUESTS[0][:1], **REQUESTS[0][1]) for _ in range(3))
    for _ in range(2):
        engine.step()
    second.abort()
    first.abort()
    first.abort()  # A second abort has no effect.
    engine.check_integrity()
    assert [piece.reason for piece in second] == ["abort"]
    pieces = list(first)
    assert [piece.step for piece in pieces[:-1]] == expected[0][:2] and pieces[-1].reason == "abort"
    engine.drain()
    assert steps_of(third) == expected[0]
    assert engine.status()["finished"]["abort"] == 2
    third.abort()  # The answer has ended.
    engine.check_integrity()


def test_an_old_stream_does_not_abort_a_new_request_with_its_id(expected) -> None:
    engine = engine_of(small(), "p-eagle")
    ids, options = REQUESTS[0]
    old = engine.add(ids, id="chat", **options)
    engine.drain()
    new = engine.add(ids, id="chat", **options)
    engine.step()
    old.abort()
    engine.drain()
    assert steps_of(new) == steps_of(old) == expected[0]
    third = engine.add(ids, id="chat", **options)
    engine.step()
    third.abort()
    assert list(third)[-1].reason == "abort" and engine.idle


class LockReleaseHook:
    """A lock that calls a hook whenever it has been released."""

    def __init__(self, lock: Any, hook: Callable[[], None]) -> None:
        self._lock = lock
        self._hook = hook

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._hook()


@pytest.mark.parametrize("release", range(1, 6))
def test_abort_between_two_parts_of_a_step(prompt, release: int) -> None:
    engine = engine_of(small(), "p-eagle")
    stream = engine.add(prompt(13), max_tokens=12)
    lock = engine.loop.lock
    releases = 0

    def abort_once() -> None:
        nonlocal releases
        releases += 1
        if releases == release:
            stream.abort()

    engine.loop.lock = LockReleaseHook(lock, abort_once)  # type: ignore[assignment]
    engine.step()
    engine.step()
    engine.loop.lock = lock
    engine.drain()
    assert releases >= release and stream.poll()[-1].reason == "abort"
    engine.check_integrity()


def test_abort_from_other_threads(engine: Engine, expected) -> None:
    """Aborts at any time during a step do not stop the loop."""

    def answer(i: int) -> list[StreamPiece]:
        ids, options = REQUESTS[i % len(REQUESTS)]
        stream, pieces = engine.add(ids, **options), []
        if i % 3 == 0:
            stream.abort()
        for piece in stream:
            pieces.append(piece)
            if i % 3 == 1 and len(pieces) == 2:
                stream.abort()
        return pieces

    with ThreadPoolExecutor(8) as pool:
        answers = [
            future.result(timeout=60) for future in [pool.submit(answer, i) for i in range(60)]
        ]
    for i, pieces in enumerate(answers):
        steps, right = [piece.step for piece in pieces if piece.step], expected[i % len(REQUESTS)]
        assert steps == (right[: len(steps)] if pieces[-1].reason == "abort" else right)
        assert i % 3 != 2 or pieces[-1].reason != "abort"


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_abort_between_plan_and_launch(
    monkeypatch: pytest.MonkeyPatch, which: str, expected
) -> None:
    """Another thread may abort a request of a step that is already planned."""
    engine = engine_of(small(), "p-eagle")
    streams = [engine.add(ids, **options) for ids, options in REQUESTS[:3]]
    if which == "decode":
        while engine.loop.scheduler.waiting or any(
            request.status == "prefill" for request in engine.loop.scheduler.running
        ):
            engine.step()
    launch, aborted = getattr(engine.loop, f"_{which}"), []

    def abort_and_launch(*args: Any, **kwargs: Any) -> None:
        if not aborted:
            aborted.append(True)
            streams[0].abort()
        launch(*args, **kwargs)

    monkeypatch.setattr(engine.loop, f"_{which}", abort_and_launch)
    engine.drain()
    engine.check_integrity()
    assert aborted and list(streams[0])[-1].reason == "abort"
    assert [steps_of(stream) for stream in streams[1:]] == expected[1:3]


def test_close_fails_waiting_requests() -> None:
    engine = Engine(small(), EngineConfig(method="p-eagle", k=3, **TIGHT | {"max_batch": 1}))
    with engine.loop.lock:
        streams = [engine.add(ids, **options) for ids, options in REQUESTS[:4]]
    engine.close()
    engine.close()
    for stream in streams[1:]:
        with pytest.raises(RequestFailed, match="the engine was closed"):
            list(stream)
    with pytest.raises(UserError, match="create a new one"):
        engine.add([5])
    assert engine._thread is not None and not engine._thread.is_alive()
    engine.check_integrity()


def test_asyncio_gets_pieces_before_a_failure(prompt) -> None:
    """Pieces that arrive together with the error are delivered."""
    engine = engine_of(small(), "none")
    stream = engine.add(prompt(5), max_tokens=9)
    for _ in range(3):
        engine.step()
    engine.close()
    seen = []

    async def read() -> None:
        async for piece in stream:
            seen.append(piece)

    with pytest.raises(RequestFailed, match="closed"):
        within(read())
    assert len(seen) == 3 and stream.ended


def test_a_disconnected_listener_does_not_affect_others(engine: Engine, expected) -> None:
    """The event loop of a client is closed while its request runs."""

    async def read_one_piece(stream: Stream) -> None:
        async for _ in stream:
            break

    ids, options = REQUESTS[0]
    for _ in range(5):
        within(read_one_piece(engine.add(ids, max_tokens=150, ignore_eos=True)))
    with ThreadPoolExecutor() as pool:
        assert pool.submit(steps_of, engine.add(ids, **options)).result(timeout=60) == expected[0]


def test_a_listener_may_abort_on_the_last_token(prompt) -> None:
    """The abort comes after the last token and before the end is reported."""
    engine = engine_of(small(), "none", kv_tokens=None)
    stream, other = (engine.add(prompt(n), max_tokens=3, ignore_eos=True) for n in (5, 6))
    pieces: list[StreamPiece] = []

    def listen() -> None:
        pieces.extend(stream.poll())
        if len(pieces) == 3:
            stream.abort()

    stream.on_piece(listen)
    engine.drain()
    engine.check_integrity()
    assert pieces[-1].reason == "abort" and len(pieces) == 4
    assert list(other)[-1].reason == "length" and engine.idle
