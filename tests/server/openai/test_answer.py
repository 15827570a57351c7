"""The pieces of an answer are joined per choice, and paced only in streams."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from peagle.core import Step
from peagle.engine.stream import Stream, StreamPiece
from peagle.server.engines.engine_slot import RequestTiming
from peagle.server.http.errors import ApiError
from peagle.server.openai.answer import CHUNK_INTERVAL, Answer
from peagle.server.openai.choice import Choice


def answer_of(
    count: int, steps: int, streams: int = 0, reason: Any = "length", unended: int = 0
) -> Answer:
    """An answer with `count` choices whose pieces have arrived, step by step.

    `unended`: choices that have not ended yet.
    """
    wakeup = SimpleNamespace(attach_loop=lambda: None, notify=lambda listener: listener())
    backend: Any = SimpleNamespace(
        engines=SimpleNamespace(wakeup=wakeup, wake=lambda: None),
        drain=SimpleNamespace(in_flight=set()),
        settings=SimpleNamespace(timeout=60),
        open_streams=streams,
        request_metrics=SimpleNamespace(
            observe_chunk=lambda *_, **__: None, observe_request=lambda *_: None
        ),
    )
    choices = [
        Choice([1], RequestTiming(time.monotonic()), Stream(str(i), 1, lambda: None), i)
        for i in range(count)
    ]
    slot: Any = SimpleNamespace(name="none", closed=False)
    answer = Answer(backend, slot, choices)
    for i in range(steps):
        for choice in choices:
            assert choice.stream is not None
            choice.stream.put(StreamPiece(Step((1, 2), 2, 1), f"{i},"))
    for choice in choices[: count - unended]:
        end(choice, reason)
    return answer


def end(choice: Choice, reason: Any = "length") -> None:
    assert choice.stream is not None
    choice.stream.put(StreamPiece(None, reason=reason))


async def all_of(answer: Answer, single: bool = False) -> list[tuple[int, str, Any]]:
    pieces = []
    while (arrived := await answer.next(single)) is not None:
        choice, piece = arrived
        pieces.append((choice.index, piece.text, piece.reason))
    answer.close()
    return pieces


def test_accumulated_pieces_of_a_choice_are_joined() -> None:
    async def main() -> None:
        answer = answer_of(3, 4)
        assert await all_of(answer) == [(i, "0,1,2,3,", "length") for i in range(3)]
        assert all(choice.text == "0,1,2,3," and choice.tokens == 8 for choice in answer.choices)
        singles = await all_of(answer_of(3, 4), single=True)
        assert [index for index, _, _ in singles] == [0, 1, 2] * 5

    asyncio.run(main())


def test_pieces_arrive_before_a_later_error() -> None:
    async def main() -> None:
        answer = answer_of(2, 3, reason="abort")
        for index in (0, 1):
            arrived = await answer.next()
            assert arrived is not None
            choice, piece = arrived
            assert (choice.index, piece.text) == (index, "0,1,2,")
        with pytest.raises(ApiError, match="aborted"):
            await answer.next()

    asyncio.run(main())


def test_only_streamed_answers_are_paced() -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await answer_of(8, 50, streams=10**6).wait()
        busy = answer_of(8, 50, streams=500, unended=1)
        began = time.monotonic()
        for _ in range(8):
            assert await busy.next() is not None
        busy.close()
        assert 7 * 500 * CHUNK_INTERVAL < time.monotonic() - began < 60
        assert busy.backend.open_streams == 500

    asyncio.run(main())


def test_the_end_of_an_answer_does_not_wait() -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            assert len(await all_of(answer_of(8, 50, streams=10**6))) == 8
            answer = answer_of(1, 1, streams=10**6, unended=1)
            assert await answer.next() is not None
            [choice] = answer.choices
            assert choice.stream is not None
            choice.stream.put(StreamPiece(Step((1, 2), 2, 1), "1,"))
            waiting = asyncio.create_task(all_of(answer))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            end(choice)
            assert await waiting == [(0, "1,", "length")]

    asyncio.run(main())


def test_an_error_ends_the_pause() -> None:
    async def main() -> None:
        answer = answer_of(2, 1, streams=10**6, unended=2)
        await answer.next()
        waiting = asyncio.create_task(answer.next())
        await asyncio.sleep(0.01)
        answer.abort(ApiError(504, "late"))
        async with asyncio.timeout(60):
            assert await waiting is not None  # Pieces before the error come first.
            with pytest.raises(ApiError, match="late"):
                await answer.next()

    asyncio.run(main())
