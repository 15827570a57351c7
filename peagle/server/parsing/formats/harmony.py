"""Harmony: the messages of GPT-OSS, which carry reasoning, calls and content in channels.

    <|channel|>analysis<|message|>The user wants a sum.<|end|><|start|>assistant
    <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>

The prompt ends with `<|start|>assistant`. The last marker may be missing, because it is a stop
token. The channel `analysis` is reasoning; `final`, and `commentary` to nobody, are content.
The package `openai-harmony` is not used: it works on tokens and downloads their vocabulary.
"""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from peagle.errors import UserError
from peagle.grammar import Grammar
from peagle.server.parsing.answer_parser import AnswerParser
from peagle.server.parsing.formats.call_grammar import (
    ANY_TEXT,
    BoundTool,
    bind_tools,
    json_value,
    marker,
    quoted,
)
from peagle.server.parsing.formats.call_id import new_call_id
from peagle.server.parsing.formats.call_object import ArgumentsObject
from peagle.server.parsing.formats.tool_parser import ToolParser
from peagle.server.parsing.tool import Tool, ToolChoice
from peagle.server.parsing.tool_format import NO_ADDED_TOKENS

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
ENDS = (END, "<|call|>", "<|return|>")
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
# The beginning of a header, which the forced end of the thinking part may cut off.
CUT_HEADER = re.compile(r"<\|start\|>(assistant(<\|channel\|>(analysis|commentary|final)?)?)?")


class HarmonyParser(ToolParser):
    def __init__(self, new_id: Callable[[], str], streams_arguments: bool) -> None:
        super().__init__(new_id, streams_arguments)
        self._has_content = False  # In an earlier message.
        self._has_reasoning = False
        self._is_first_text = True  # Of the message.

    def _parse(self) -> Generator[None, None, None]:
        found = yield from self._read_content((START, CHANNEL, *ENDS))
        while found:
            if found in ENDS:
                found = yield from self._read_content((START, CHANNEL, *ENDS))
            else:
                found = yield from self._parse_message(found)

    def _parse_message(self, start: str) -> Generator[None, None, str]:
        """Read a message from its header on; returns the marker that ends it."""
        collected: list[str] = []
        end = yield from self._read_until((MESSAGE, START, *ENDS), collected.append)
        header = start + "".join(collected)
        if end != MESSAGE:
            if end != END or not CUT_HEADER.fullmatch(header):
                self._give_content(header)
            return end
        self._is_first_text = True
        channel, recipient = CHANNEL_NAME.search(header), RECIPIENT.search(header)
        if recipient is not None:
            return (yield from self._parse_call(header + end, recipient[1]))
        is_reasoning = channel is not None and channel[1] == "analysis"
        give = self._give_message_reasoning if is_reasoning else self._give_message_content
        return (yield from self._read_until((START, *ENDS), give))

    def _parse_call(self, header: str, recipient: str) -> Generator[None, None, str]:
        blank = yield from self._read_chars()
        call = ArgumentsObject(recipient.removeprefix("functions.") or recipient)
        given = yield from self._read_object(call)
        rest: list[str] = [(yield from self._read_chars())] if call.done else []
        end = yield from self._read_until((START, *ENDS), rest.append)
        text = "".join(rest)
        valid = call.call() if not text.strip() else None
        if valid is not None and not given:
            self._give_call(valid)
        elif not given:
            self._give_content(header + blank + call.text + text + (end if end in ENDS else ""))
        return end

    def _give_message_reasoning(self, text: str) -> None:
        if text and self._is_first_text and self._has_reasoning:
            text = "\n" + text
        if text:
            self._is_first_text, self._has_reasoning = False, True
            self._give_reasoning(text)

    def _give_message_content(self, text: str) -> None:
        if text and self._is_first_text and self._has_content:
            text = "\n" + text
        if text:
            self._is_first_text, self._has_content = False, True
            self._give_content(text)


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    new_id: Callable[[], str] = new_call_id
    name = "harmony"
    markers = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
    shows_special_tokens = True

    def parser(self, tools: Sequence[Tool], streams_arguments: bool) -> AnswerParser:
        return HarmonyParser(self.new_id, streams_arguments)

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        added_tokens: Mapping[str, int] = NO_ADDED_TOKENS,
    ) -> Grammar | None:
        """The whole answer, reasoning included; it ends with one call, as GPT-OSS makes them."""
        bound = bind_tools(tools, choice)
        if not bound:
            return None
        for token in (START, CHANNEL, CONSTRAIN, MESSAGE, END):
            if token not in added_tokens:
                raise UserError(
                    f"the tool parser harmony needs a target with the token {token}: use another"
                )
        return Grammar("lark", "\n".join(rules(bound, choice, added_tokens)))


def rules(
    bound: Sequence[BoundTool], choice: ToolChoice, added_tokens: Mapping[str, int]
) -> list[str]:
    start, channel, constrain, message, end = (
        marker(text, added_tokens) for text in (START, CHANNEL, CONSTRAIN, MESSAGE, END)
    )
    last = "call" if choice.kind != "auto" else f'call | {channel} "final" {message} TEXT?'
    lines = [
        f'start: (before {end} {start} "assistant")* last',
        f'before: {channel} ("analysis" | "commentary") {message} TEXT?',
        f"last: {last}",
        f"TEXT: /(?s:.+)/ & ~/{ANY_TEXT}<\\|[a-z]+\\|>{ANY_TEXT}/",
        f"call: {channel} function",
        f"function: {' | '.join(f'function_{i}' for i in range(len(bound)))}",
    ]
    for i, tool in enumerate(bound):
        head = quoted(f"commentary to=functions.{tool.name} ")
        body = f'{head} {constrain} "json" {message} {json_value(tool.schema, tool.lenient)}'
        lines.append(f"function_{i}: {body}")
    return lines
