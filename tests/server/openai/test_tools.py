"""Tools over HTTP: constrained and free calls, whole and streamed, with and without drafts.

A random target never writes a call by itself: `guided_choice` makes it write a given text.
"""

import json
from functools import partial
from typing import Any

import httpx
import jsonschema
import pytest

from peagle.server.front.engine_backend import EngineBackend
from peagle.server.http.schema import Message
from peagle.server.parsing.tool_formats import TOOL_FORMATS
from tests.support.api.tool_pair import MARKERS, SCHEMAS, TEMPLATE, TOOLS, tool, tool_pair
from tests.support.command_line import run
from tests.support.grammars import COMPACT
from tests.support.server import serving

served = partial(serving.served, loader=tool_pair)
ask = partial(serving.ask, words="What is the weather?", max_tokens=300)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "clock", "arguments": {"zone": "utc"}}\n</tool_call>'
ONE_CALL = {"parallel_tool_calls": False}


async def message(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    choice = (await ask(client, **body))["choices"][0]
    return choice["message"] | {"finish_reason": choice["finish_reason"]}


def functions(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of a message without their ids, which are random."""
    calls = message.get("tool_calls") or []
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["type"] == "function" for call in calls)
    return [call["function"] for call in calls]


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of choice 0 as a client joins its chunks."""
    content = ""
    calls: list[dict[str, Any]] = []
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        content += choice["delta"].get("content") or ""
        for delta in choice["delta"].get("tool_calls", []):
            if delta["index"] == len(calls):
                assert delta["function"]["arguments"] == ""
                calls.append(delta | {"function": dict(delta["function"])})
            else:
                calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    reason = chunks[-1]["choices"][0]["finish_reason"]
    return {"content": content or None, "tool_calls": calls, "finish_reason": reason}


def check_call(function: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])


def test_required_and_named() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        named = {"type": "function", "function": {"name": "clock"}}
        for choice in ("required", named):
            body: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice} | ONE_CALL
            whole = await message(client, **body)
            assert (whole["content"], whole["finish_reason"]) == (None, "tool_calls")
            (function,) = functions(whole)
            check_call(function)
            assert choice == "required" or function["name"] == "clock"
            for more in ({"method": "none"}, {"k": 7}):
                assert functions(await message(client, **body, peagle=more)) == [function]
            streamed = joined(await ask(client, **body, stream=True))
            assert functions(streamed) == [function]
            assert streamed["finish_reason"] == "tool_calls"

    served(test)


def test_unsupported_schema_keywords() -> None:
    """They are refused for strict tools, which guarantee the schema, and ignored for others."""

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        schema = SCHEMAS["clock"] | {"propertyNames": {"type": "string"}}
        body: dict[str, Any] = {"tool_choice": "required"} | ONE_CALL
        check_call(functions(await message(client, tools=[tool("clock", schema)], **body))[0])
        strict = [tool("clock", schema, strict=True)]
        error = (await ask(client, tools=strict, **body, code=400))["error"]
        assert error["param"] == "tools" and "propertyNames" in error["message"]

    served(test)


def test_forced_calls_that_are_cut_off() -> None:
    """No part of a call's markers is content, and arguments that are cut off are no tool_calls."""

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        body: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
        for limit in (3, 12, 30, 60):
            cut = await message(client, **body, max_tokens=limit, temperature=1, seed=limit)
            assert (cut["content"] or "", cut["finish_reason"]) == ("", "length")
        body |= {"stop": ['"arguments": {"'], "include_stop_str_in_output": True}
        stopped = await message(client, **body, max_tokens=100)
        assert len(functions(stopped)) == 1 and not stopped["content"]
        assert stopped["finish_reason"] == "stop"

    served(test)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_in_every_format(name: str) -> None:
    """Constrained calls of every format; markers are special tokens if they usually are."""

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        body: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"} | ONE_CALL
        body |= {"temperature": 1.0, "seed": 5}
        # Force a call in harmony, which may write any number of other messages before it.
        ids = tool_pair(TEMPLATE, MARKERS).target.tokenizer.convert_tokens_to_ids
        body |= {"logit_bias": {str(ids(token)): -100 for token in ("a", "<|message|>")}}
        whole = await message(client, **body)
        assert whole["finish_reason"] == "tool_calls", whole
        (function,) = functions(whole)
        check_call(function)
        plain = await message(client, **body, peagle={"method": "none"})
        assert functions(plain) == [function]
        assert functions(joined(await ask(client, **body, stream=True))) == [function]

    served(test, loader=partial(tool_pair, TEMPLATE, MARKERS), tool_parser=name)


def test_a_constrained_call_cut_off_by_a_stop_string() -> None:
    """Its arguments are not valid JSON, so it must not appear as a call."""

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        clock = {"type": "function", "function": {"name": "clock"}}
        body: dict[str, Any] = {"tools": TOOLS, "tool_choice": clock, "stop": "zo"}
        whole = await message(client, **body)
        assert [function["arguments"] for function in functions(whole)] == ['{"']
        assert whole["finish_reason"] == "stop"
        assert joined(await ask(client, **body, stream=True))["finish_reason"] == "stop"

    served(test)


def test_strict_tools() -> None:
    """With `auto`, calls of a strict tool are constrained from their beginning."""

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        strict = [tool("weather", SCHEMAS["weather"], strict=True)]
        answers = [
            await message(client, tools=strict, temperature=1, seed=2, max_tokens=40, peagle=each)
            for each in ({"method": "p-eagle"}, {"method": "none"})
        ]
        assert answers[0]["content"] and answers[0]["content"] == answers[1]["content"]
        wrong = [tool("weather", {"type": "strin"}, strict=True)]
        error = (await ask(client, tools=wrong, code=400))["error"]
        assert error["param"] == "tools" and "weather" in error["message"]

    served(test)


SCRIPTS: dict[str, tuple[str, str | None, list[str]]] = {
    "text": ("Sunny.", "Sunny.", []),
    "a call": (CALL, None, ["weather"]),
    "text and calls": (f"Let me see.\n{CALL}\n{OTHER}", "Let me see.", ["weather", "clock"]),
    "no JSON": ("<tool_call>\n{weather}\n</tool_call>", "<tool_call>\n{weather}\n</tool_call>", []),
    "cut off": (CALL[:40], CALL[:40], []),
}


def test_tool_choice_auto() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        for text, content, names in SCRIPTS.values():
            body: dict[str, Any] = {"tools": TOOLS, "guided_choice": [text]}
            whole = await message(client, **body)
            assert whole["content"] == content
            assert [function["name"] for function in functions(whole)] == names
            assert whole["finish_reason"] == ("tool_calls" if names else "stop")
            for more in ({}, {"peagle": {"trace": True}}):
                chunks = await ask(client, **body, stream=True, **more)
                streamed = joined(chunks)
                assert functions(streamed) == functions(whole)
                assert streamed["content"] == content
                deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
                assert more or all(any(delta.values()) for delta in deltas[1:-1])
        assert functions(await message(client, **body, **ONE_CALL)) == []
        body["guided_choice"] = [f"{OTHER}\n{CALL}"]
        one = await message(client, **body, **ONE_CALL)
        assert [function["name"] for function in functions(one)] == ["clock"]

    served(test)


def test_tool_choice_none_and_no_tools() -> None:
    """Without tools, the text is the answer, and the prompt does not contain tools."""

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        body: dict[str, Any] = {"guided_choice": [CALL], "tool_choice": "none"}
        shown = await ask(client, tools=TOOLS, guided_choice=[CALL])
        hidden = await ask(client, tools=TOOLS, **body)
        assert hidden["choices"][0]["message"]["content"] == CALL
        assert hidden["usage"] == (await ask(client, **body))["usage"]
        assert hidden["usage"]["prompt_tokens"] < shown["usage"]["prompt_tokens"] - 100
        assert (await ask(client, tools=[], **body))["choices"][0]["message"]["content"] == CALL

    served(test)


def test_logprobs_and_trace() -> None:
    """Every token has its log-probability and every step its trace, even if text is held back."""

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        body: dict[str, Any] = {"tools": TOOLS, "guided_choice": [CALL], "logprobs": True}
        whole = (await ask(client, **body))["choices"][0]["logprobs"]["content"]
        assert "".join(entry["token"] for entry in whole) == CALL
        body |= {"stream": True, "peagle": {"trace": True}}
        chunks = await ask(client, **body)
        streamed = [
            entry
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["logprobs"]
            for entry in choice["logprobs"]["content"]
        ]
        assert [entry["token"] for entry in streamed] == [entry["token"] for entry in whole]
        traced = [chunk["peagle"] for chunk in chunks if "peagle" in chunk]
        assert "".join(text for step in traced for text in step["texts"]).startswith(CALL)

    served(test)


CONVERSATION: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {
                "id": "a1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "a1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "a2", "content": "warm"},
]


async def prompt_text(client: httpx.AsyncClient, **body: Any) -> str:
    """The prompt as text."""
    tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
    answer = await client.post("/detokenize", json={"tokens": tokens})
    return str(answer.json()["prompt"])


def test_template_with_tools() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        text = await prompt_text(client, messages=CONVERSATION, tools=TOOLS)
        lines = text.split("\n")
        shown = json.loads(lines[0].removeprefix("tool "))
        expected = {
            "name": "weather",
            "description": "the weather",
            "parameters": SCHEMAS["weather"],
        }
        assert shown == {"type": "function", "function": expected}
        assert lines[2:] == [
            "<tool_call>system:Be brief.",
            "user:Weather?",
            "assistant:<call>weather city=Rome days=2",
            "tool:sunny",
            "tool:warm",
            "assistant:",
        ]
        usage = (await ask(client, messages=CONVERSATION, tools=TOOLS, max_tokens=1))["usage"]
        assert usage["prompt_tokens"] == len(
            (
                await client.post("/tokenize", json={"messages": CONVERSATION, "tools": TOOLS})
            ).json()["tokens"]
        )
        loose = [{"role": "assistant", "tool_calls": [{"function": {"name": "x"}}]}]
        assert "<call>x\n" in await prompt_text(client, messages=loose)

    served(test)


TEXT_TEMPLATE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if tools %}{% endif %}{{ c.function.name + ':' + c.function.arguments }}"
    "{% endfor %}{% endfor %}"
)


def test_template_with_arguments_as_text() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        text = await prompt_text(client, messages=CONVERSATION)
        assert text == 'weather:{"city": "Rome", "days": 2}'

    served(test, loader=partial(tool_pair, TEXT_TEMPLATE))


PLAIN_TEMPLATE = (
    "{# tools are not supported #}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
)


def test_template_without_tools() -> None:
    """The prompt still contains tools, calls and results as text."""

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        text = await prompt_text(client, messages=CONVERSATION, tools=TOOLS)
        assert text.startswith("system: Be brief.\n\nYou can call")
        assert f"assistant: {CALL}\n" in text and text.index("</tool_call>") < text.index("user: ")
        results = (
            "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nwarm\n</tool_response>"
        )
        assert text.endswith(f"user: {results}\nassistant: ")
        assert all(json.dumps(each["function"]) in text for each in TOOLS)
        hello = [{"role": "user", "content": "hi"}]
        assert (await prompt_text(client, messages=hello, tools=TOOLS)).startswith("system: You")
        assert await prompt_text(client, messages=hello) == "user: hi\nassistant: "
        body: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"} | ONE_CALL
        check_call(functions(await message(client, **body))[0])

    served(test, loader=partial(tool_pair, PLAIN_TEMPLATE))


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": COMPACT | SCHEMAS["clock"]}}


def test_response_format_with_tools() -> None:
    """With `auto`, an answer is calls or follows the format; forced calls ignore the format."""

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        body: dict[str, Any] = {"tools": TOOLS, "response_format": FORMAT} | ONE_CALL
        answers = []
        for first in ("<", "{"):
            token = tool_pair().target.tokenizer.convert_tokens_to_ids(first)
            answers.append(await message(client, **body, logit_bias={str(token): 100}))
        check_call(functions(answers[0])[0])
        jsonschema.validate(json.loads(answers[1]["content"]), SCHEMAS["clock"])
        for choice in ("required", {"type": "function", "function": {"name": "clock"}}):
            forced = body | {"tool_choice": choice}
            answer = await message(client, **forced)
            check_call(functions(answer)[0])
            assert answer["content"] is None
            forced["response_format"] = {"type": "json_schema"}
            error = (await ask(client, **forced, code=400))["error"]
            assert error["param"] == "response_format" and "missing" in error["message"]
        free = await message(client, **body | {"tool_choice": "none"})
        jsonschema.validate(json.loads(free["content"]), SCHEMAS["clock"])

    served(test)


GOOD = {"type": "function", "function": {"name": "f"}}
CHOICE = {"type": "function", "function": {"name": "g"}}
CALL_FIELD = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no list": ({"tools": {}}, "list", "tools"),
    "other type": ({"tools": [{"type": "web_search"}]}, "web_search", "tools"),
    "no function": ({"tools": [{"type": "function"}]}, "function", "tools"),
    "bad name": ({"tools": [tool("a b")]}, "pattern", "tools.0.function.name"),
    "long name": ({"tools": [tool("a" * 129)]}, "pattern", "tools.0.function.name"),
    "twice": ({"tools": [GOOD, GOOD]}, "twice", "tools"),
    "many": ({"tools": [tool(f"f{i}") for i in range(513)]}, "512", "tools"),
    "parameters": ({"tools": [tool("f", [1])]}, "dictionary", "tools.0.function.parameters"),  # type: ignore[arg-type]
    "array": (
        {"tools": [tool("f", {"type": "array"})], "tool_choice": "required"},
        "object",
        "tools",
    ),
    "no tools": ({"tool_choice": "required"}, "requires tools", "tool_choice"),
    "named, no tools": ({"tool_choice": CHOICE}, "requires tools", "tool_choice"),
    "unknown name": ({"tools": [GOOD], "tool_choice": CHOICE}, "'g'", "tool_choice"),
    "unknown choice": ({"tools": [GOOD], "tool_choice": "any"}, "required", "tool_choice"),
    "functions": ({"functions": [{"name": "f"}]}, "use tools", "functions"),
    "function_call": ({"function_call": "auto"}, "tool_choice", "function_call"),
    "call without name": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "required",
        "messages.0.tool_calls.0.function.name",
    ),
    "many calls": (
        {"messages": [{"role": "assistant", "tool_calls": [CALL_FIELD] * 513}]},
        "512",
        "messages.0.tool_calls",
    ),
    "kwargs": ({"chat_template_kwargs": {"tools": []}}, "leave it out", "chat_template_kwargs"),
    "effort": ({"reasoning_effort": "huge"}, "medium", "reasoning_effort"),
    "budget": ({"max_thinking_tokens": -1}, "0", "max_thinking_tokens"),
    "ignore_eos": (
        {"tools": TOOLS, "tool_choice": "required", "ignore_eos": True},
        "ignore_eos",
        "",
    ),
}


def test_invalid_values_are_400() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        for name, (body, words, param) in BAD.items():
            error = (await ask(client, code=400, **body))["error"]
            assert words in error["message"], (name, error)
            assert not param or error["param"] == param, (name, error)
        prompt = {"prompt": "a", "tools": TOOLS}
        refused = await client.post(serving.TEXT, json=prompt)
        assert refused.status_code == 400 and "chat" in refused.json()["error"]["message"]

    served(test)


def test_long_tools_are_refused_before_they_are_tokenized() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        long = [tool("f", {"type": "object", "description": "word " * 100_000})]
        error = (await ask(client, tools=long, code=400))["error"]
        assert "context" in error["message"]

    served(test)


def test_arguments_are_counted_while_the_body_is_checked() -> None:
    """Counting them later would block the event loop: converting a million values takes long."""
    call = {"id": "i" * 9, "function": {"name": "f", "arguments": {"a": 1}}}
    earlier = Message.model_validate({"role": "assistant", "tool_calls": [call]})
    assert earlier.tool_calls
    earlier.tool_calls[0].function.arguments = {"a": "not looked at again"}
    assert earlier.characters == len("iiiiiiiiif{'a': 1}")


def test_unknown_parsers_are_refused_before_anything_is_loaded() -> None:
    for name in TOOL_FORMATS:
        assert name in run("serve", "no-such-pair", "--tool-parser", "hermse", code=2)
    assert "think-tags" in run("serve", "no-such-pair", "--reasoning-parser", "r1", code=2)
    own = run("serve", "x", "--engine", "vllm", "--tool-parser", "hermes", code=2)
    assert "--tool-call-parser" in own
