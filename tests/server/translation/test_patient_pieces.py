"""Keep-alive events of a stream during silence."""

import asyncio
from typing import Any

import pytest

from peagle.server.http.errors import ApiError
from peagle.server.translation.patient_pieces import patient_pieces


class SlowAnswer:
    """A chat answer whose first piece arrives after the test has seen the silence."""

    def __init__(self, error: ApiError | None = None) -> None:
        self.arrived = asyncio.Event()
        self.pieces: list[Any] = ["one", "two", None]
        self.error = error
        self.canceled = False

    async def next(self, single: bool = False) -> Any:
        try:
            await self.arrived.wait()
        except asyncio.CancelledError:
            self.canceled = True
            raise
        if self.error is not None:
            raise self.error
        return self.pieces.pop(0)


def test_silence_is_reported_until_the_pieces_arrive() -> None:
    async def main() -> None:
        answer: Any = SlowAnswer()
        seen: list[Any] = []
        async for piece in patient_pieces(answer, silence=0.01):
            seen.append(piece)
            if len(seen) == 2:
                answer.arrived.set()
        assert seen[:2] == [None, None]
        assert [piece for piece in seen if piece is not None] == ["one", "two"]

    asyncio.run(main())


def test_errors_are_raised_and_closing_cancels_the_wait() -> None:
    async def main() -> None:
        failing: Any = SlowAnswer(ApiError(504, "too slow"))
        failing.arrived.set()
        with pytest.raises(ApiError, match="too slow"):
            async for _ in patient_pieces(failing):
                pass
        waiting: Any = SlowAnswer()
        pieces = patient_pieces(waiting, silence=0.01)
        assert await anext(pieces) is None
        await pieces.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        assert waiting.canceled

    asyncio.run(main())
