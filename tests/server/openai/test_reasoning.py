"""Reasoning over HTTP: its fields, its budget, and grammars for the answer after it."""

import json
from functools import partial
from typing import Any

import httpx
import jsonschema
import pytest

from peagle.server.front.engine_backend import EngineBackend
from tests.support.api.tool_pair import MARKERS, SCHEMAS, THINKING_TEMPLATE, TOOLS, tool_pair
from tests.support.grammars import COMPACT
from tests.support.server import serving

served = partial(serving.served, loader=partial(tool_pair, THINKING_TEMPLATE))
ask = partial(serving.ask, words="Why?", max_tokens=120)
INSIDE = {"chat_template_kwargs": {"thinks": "inside"}}
SCRIPT = "<think>\nHm, well.\n</think>\n\nBecause."
CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "utc"}}\n</tool_call>'
FORMAT = {"type": "json_schema", "json_schema": {"schema": COMPACT | SCHEMAS["clock"]}}


async def message(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = (await ask(client, **body))["choices"][0]["message"]
    return answer


def joined(chunks: list[dict[str, Any]], name: str) -> str:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get(name) or "" for delta in deltas)


def test_reasoning_has_its_own_fields() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        body = {"guided_choice": [SCRIPT]}
        whole = await message(client, **body)
        assert whole["content"] == "Because."
        assert whole["reasoning_content"] == whole["reasoning"] == "Hm, well."
        chunks = await ask(client, **body, stream=True)
        assert joined(chunks, "content") == "Because."
        assert joined(chunks, "reasoning_content") == joined(chunks, "reasoning") == "Hm, well."
        hidden = await message(client, **body, include_reasoning=False)
        assert hidden["content"] == "Because." and "reasoning" not in hidden
        chunks = await ask(client, **body, include_reasoning=False, stream=True)
        assert joined(chunks, "content") == "Because." and not joined(chunks, "reasoning")
        plain = await message(client, guided_choice=["Because."])
        assert plain["content"] == "Because." and "reasoning" not in plain
        called = await message(client, guided_choice=[f"<think>Hm</think>{CALL}"], tools=TOOLS)
        assert (
            called["reasoning"] == "Hm" and called["tool_calls"][0]["function"]["name"] == "clock"
        )

    served(test)


def test_reasoning_parser_none_keeps_tags_in_the_content() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        assert (await message(client, guided_choice=[SCRIPT]))["content"] == SCRIPT

    served(test, reasoning_parser="none")


def test_the_thinking_budget_is_enforced() -> None:
    """The thinking part is closed after the given number of tokens, with and without drafts."""

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        free = await message(client, **INSIDE, logprobs=True)
        assert free["content"] == "" and free["reasoning"]
        for field, budget in (("max_thinking_tokens", 9), ("thinking_token_budget", 0)):
            body = INSIDE | {field: budget, "logprobs": True, "temperature": 1, "seed": 7}
            choice = (await ask(client, **body))["choices"][0]
            tokens = choice["logprobs"]["content"]
            text = "".join(entry["token"] for entry in tokens[budget:])
            assert text.startswith("\n</think>\n\n")
            thought = bytes(byte for entry in tokens[:budget] for byte in entry["bytes"])
            reasoning = choice["message"].get("reasoning", "")
            shown = thought.decode(errors="replace").replace("<user>", "")  # a special token
            assert reasoning == shown.strip("\n")
            for more in ({"method": "none"}, {"method": "eagle3"}):
                other = (await ask(client, **body, peagle=more))["choices"][0]
                assert other["message"] == choice["message"]
        closed = {"chat_template_kwargs": {"enable_thinking": False}, "max_thinking_tokens": 0}
        assert "reasoning" not in await message(client, **closed)
        assert "reasoning" not in await message(client, reasoning_effort="none")

    served(test)


def test_grammars_apply_after_the_reasoning() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        body: dict[str, Any] = INSIDE | {"response_format": FORMAT, "max_thinking_tokens": 12}
        answer = await message(client, **body)
        assert answer["reasoning"]
        jsonschema.validate(json.loads(answer["content"]), SCHEMAS["clock"])
        assert await message(client, **body, peagle={"method": "none"}) == answer
        tools: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
        tools["parallel_tool_calls"] = False
        called = await message(client, **INSIDE, **tools, max_thinking_tokens=12)
        assert called["reasoning"] and called["content"] is None
        function = called["tool_calls"][0]["function"]
        jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
        # The grammar applies at once if the prompt closes the part or the target does not open it.
        closed = {"chat_template_kwargs": {"enable_thinking": False}}
        start = tool_pair(THINKING_TEMPLATE).target.tokenizer.convert_tokens_to_ids("<")
        for more in (closed, {"logit_bias": {str(start): -100}}):
            direct = await message(client, response_format=FORMAT, **more)
            jsonschema.validate(json.loads(direct["content"]), SCHEMAS["clock"])
        opened = {"logit_bias": {str(start): 100}, "max_thinking_tokens": 3}
        thought = await message(client, response_format=FORMAT, **opened)
        assert thought["reasoning"]
        jsonschema.validate(json.loads(thought["content"]), SCHEMAS["clock"])

    served(test)


EFFORT_TEMPLATE = "{{ reasoning_effort }} {{ enable_thinking }} {{ mode }}<think></think>"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"reasoning_effort": "high"}, "high  "),
        ({"reasoning_effort": "none"}, "none False "),
        (
            {
                "reasoning_effort": "low",
                "chat_template_kwargs": {"reasoning_effort": "x", "mode": 1},
            },
            "x  1",
        ),
    ],
    ids=str,
)
def test_effort_reaches_the_template(body: dict[str, Any], text: str) -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        tokenizer = tool_pair(EFFORT_TEMPLATE).target.tokenizer
        usage = (await ask(client, max_tokens=1, **body))["usage"]
        expected = tokenizer.encode(f"{text}<think></think>", add_special_tokens=False)
        assert usage["prompt_tokens"] == len(expected)

    served(test, loader=partial(tool_pair, EFFORT_TEMPLATE))


HARMONY_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{{ tools }}<|start|>assistant{# <|channel|> #}"
)


def test_harmony_channels() -> None:
    """Channels are also parsed without tools; after the budget, the final channel follows."""

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        body: dict[str, Any] = {"max_thinking_tokens": 5, "logprobs": True}
        choice = (await ask(client, **body, max_tokens=40))["choices"][0]
        text = "".join(entry["token"] for entry in choice["logprobs"]["content"][8:])
        assert text.startswith("<|end|><|start|>assistant<|channel|>final<|message|>")
        answer = await message(client, max_thinking_tokens=5, response_format=FORMAT)
        _, brace, rest = answer["content"].rpartition("{")
        jsonschema.validate(json.loads(brace + rest), SCHEMAS["clock"])
        tools = {"tools": TOOLS, "tool_choice": "required", "max_thinking_tokens": 5}
        error = (await ask(client, code=400, **tools))["error"]
        assert error["param"] == "max_thinking_tokens"
        error = (await ask(client, code=400, tools=TOOLS, response_format=FORMAT))["error"]
        assert error["param"] == "response_format"

    served(test, loader=partial(tool_pair, HARMONY_TEMPLATE, MARKERS))
