"""An answer's pieces: joined by choice where they pile up, and held back only while they are sent."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from peagle.core import Step
from peagle.engine.stream import Stream, StreamPiece
from peagle.server.engines.driver import Ticket
from peagle.server.http.errors import ApiError
from peagle.server.openai.answer import PACE, Answer, Choice


def answer_of(choices: int, steps: int, streams: int = 0, reason: Any = "length") -> Answer:
    """All its pieces are there, step after step."""
    bell = SimpleNamespace(listen=lambda: None, ring=lambda listener: listener())
    front: Any = SimpleNamespace(
        engines=SimpleNamespace(driver=SimpleNamespace(bell=bell, wake=lambda: None)),
        drain=SimpleNamespace(in_flight=set()),
        settings=SimpleNamespace(timeout=60),
        streams=streams,
        measured=SimpleNamespace(piece=lambda *_, **__: None, answer=lambda _: None),
    )
    made = [
        Choice(i, [1], Ticket(time.monotonic()), Stream(str(i), 1, lambda _: None))
        for i in range(choices)
    ]
    slot: Any = SimpleNamespace(name="none", engine=SimpleNamespace(closed=False))
    answer = Answer(front, slot, made)
    for at in range(steps + 1):
        for choice in made:
            assert choice.stream is not None
            end = at == steps
            choice.stream.put(
                StreamPiece(None, reason=reason)
                if end
                else StreamPiece(Step((1, 2), 2, 1), f"{at},")
            )
    return answer


async def all_of(answer: Answer, single: bool = False) -> list[tuple[int, str, Any]]:
    found = []
    while (news := await answer.next(single)) is not None:
        found.append((news[0].index, news[1].text, news[1].reason))
    answer.close()
    return found


def test_all_that_a_choice_has_said_is_one_piece() -> None:
    async def main() -> None:
        answer = answer_of(3, 4)
        assert await all_of(answer) == [(i, "0,1,2,3,", "length") for i in range(3)]
        assert all(choice.text == "0,1,2,3," and choice.tokens == 8 for choice in answer.choices)
        singles = await all_of(answer_of(3, 4), single=True)
        assert [index for index, _, _ in singles] == [0, 1, 2] * 5

    asyncio.run(main())


def test_what_came_before_an_error_is_told_before_it() -> None:
    async def main() -> None:
        answer = answer_of(2, 3, reason="abort")
        for index in (0, 1):
            news = await answer.next()
            assert news is not None and (news[0].index, news[1].text) == (index, "0,1,2,")
        with pytest.raises(ApiError, match="aborted"):
            await answer.next()

    asyncio.run(main())


def test_a_whole_answer_is_not_held_back_and_chunks_only_as_often_as_there_are_choices() -> None:
    async def main() -> None:
        async with asyncio.timeout(0.5):
            await answer_of(8, 50, streams=1000).whole()
        busy, began = answer_of(8, 50, streams=500), time.monotonic()
        assert len(await all_of(busy)) == 8
        assert 7 * 500 * PACE < time.monotonic() - began < 100 * 500 * PACE
        assert busy.front.streams == 500

    asyncio.run(main())
