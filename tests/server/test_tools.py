"""Tools over HTTP: calls that a grammar binds, whole and streamed, with and without drafts."""

import json
from functools import partial
from typing import Any

import httpx
import jsonschema

from peagle.server.front.engine_backend import EngineBackend
from tests.support import serving
from tests.support.tool_pair import SCHEMAS, TOOLS, tool_pair

served = partial(serving.served, loader=tool_pair)
ask = partial(serving.ask, words="What is the weather?", max_tokens=300)


def streamed_calls(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of choice 0 as a client joins them, without ids."""
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            for delta in choice["delta"].get("tool_calls", []):
                if delta["index"] == len(calls):
                    assert delta["id"] and delta["type"] == "function"
                    calls.append({"name": delta["function"]["name"], "arguments": ""})
                calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
    return calls


def test_required() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        body: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
        body["parallel_tool_calls"] = False
        choice = (await ask(client, **body))["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert message["content"] is None
        (call,) = message["tool_calls"]
        function = call["function"]
        jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
        for more in ({"method": "none"}, {"method": "eagle3"}, {"k": 7}):
            other = (await ask(client, **body, peagle=more))["choices"][0]["message"]
            assert other["tool_calls"][0]["function"] == function
        chunks = await ask(client, **body, stream=True)
        assert streamed_calls(chunks) == [function]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"

    served(test)
