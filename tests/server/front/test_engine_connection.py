"""EngineConnection: the connection of a web server process to an engine process."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from peagle.engine.stream import RequestFailed, Stream
from peagle.server.engines.engine_slot import RequestTiming
from peagle.server.front.add_message import add_message
from peagle.server.front.engine_connection import EngineConnection
from peagle.server.front.front_request import FrontRequest
from peagle.server.front.generation_params import GenerationParams
from peagle.server.messages import EngineKey, FrontBatch, Output, WorkerBatch


class WordDetokenizer:
    include_stop = False
    stop_string = None

    def push(self, tokens: list[int]) -> Any:
        if 13 in tokens:
            raise ValueError("no such token")
        return SimpleNamespace(text="word " * len(tokens), stopped=False)

    def finish(self) -> str:
        return ""


def make_request(number: int) -> FrontRequest:
    return FrontRequest(
        add_message(number, EngineKey("none", 0), [6], GenerationParams(8)),
        Stream(str(number), 1, lambda: None),
        RequestTiming(0.0),
        WordDetokenizer(),  # type: ignore[arg-type]
        frozenset(),
    )


def test_a_detokenization_error_ends_only_its_request() -> None:
    async def main() -> None:
        connection = EngineConnection("engine", lambda target: None)
        sent = FrontBatch()
        connection.link = SimpleNamespace(batch=lambda: sent)  # type: ignore[assignment]
        requests = [make_request(number) for number in (1, 2)]
        for request in requests:
            connection.send(request)
        outputs = [Output(1, [13]), Output(2, [7, 8], reason="length")]
        connection._receive(WorkerBatch(accepted=[1, 2], outputs=outputs))
        with pytest.raises(RequestFailed, match="internal server error"):
            requests[0].stream.poll()
        pieces = requests[1].stream.poll()
        assert [piece.text for piece in pieces] == ["word word ", ""]
        assert pieces[-1].reason == "length"
        assert [abort.id for abort in sent.aborts] == [1] and not connection.requests

    asyncio.run(main())
