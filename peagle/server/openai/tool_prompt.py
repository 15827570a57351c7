"""Tools as text, for chat templates that know no tools: the target must see them nevertheless.

The tools and the format of calls become part of the system message; earlier calls become text of
the assistant's messages, and results become messages of the user.
"""

import json
from collections.abc import Sequence
from typing import Any

from peagle.server.parsing.formats.hermes import END, START

INTRODUCTION = "You can call these functions, each described by one JSON object:"
CALL_FORMAT = (
    "To call a function, write its name and its arguments as one JSON object between tags:\n"
    f'{START}\n{{"name": "function name", "arguments": {{"argument name": "value"}}}}\n{END}\n'
    "The result comes back between <tool_response> and </tool_response>."
)


def tools_as_text(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], is_hermes: bool
) -> list[dict[str, Any]]:
    """The conversation without tools, calls and results, which its texts hold instead.

    `is_hermes`: calls are expected in the Hermes format; another one is not described.
    """
    conversation: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            add_result(conversation, message["content"])
        else:
            conversation.append(calls_as_text(message))
    if not tools:
        return conversation
    description = describe_tools(tools, is_hermes)
    if conversation and conversation[0]["role"] == "system":
        content = f"{conversation[0]['content']}\n\n{description}".lstrip()
        return [conversation[0] | {"content": content}, *conversation[1:]]
    return [{"role": "system", "content": description}, *conversation]


def describe_tools(tools: Sequence[dict[str, Any]], is_hermes: bool) -> str:
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = "\n".join([INTRODUCTION, *lines])
    return f"{text}\n\n{CALL_FORMAT}" if is_hermes else text


def calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [
        f"{START}\n{json.dumps(call['function'], ensure_ascii=False)}\n{END}" for call in calls
    ]
    content = "\n".join([message["content"], *texts] if message["content"] else texts)
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return rest | {"content": content}


def with_argument_texts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as JSON text, not as objects."""
    if "tool_calls" not in message:
        return message
    calls = [call | {"function": text_function(call["function"])} for call in message["tool_calls"]]
    return message | {"tool_calls": calls}


def text_function(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        return function
    return function | {"arguments": json.dumps(arguments, ensure_ascii=False)}


def add_result(conversation: list[dict[str, Any]], content: str) -> None:
    """Add the result of a call. Results in a row are one message: roles alternate."""
    text = f"<tool_response>\n{content}\n</tool_response>"
    if conversation and conversation[-1].get("role") == "user" and is_result(conversation[-1]):
        text = f"{conversation.pop()['content']}\n{text}"
    conversation.append({"role": "user", "content": text})


def is_result(message: dict[str, Any]) -> bool:
    content: str = message["content"]
    return content.startswith("<tool_response>") and content.endswith("</tool_response>")
