"""ChatAnswer: the answer to a chat request, parsed into content, reasoning and tool calls.

Every endpoint that answers messages uses it: chat completions, responses and Anthropic's messages
differ in how they write the parts.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import Request

from peagle.server.front.engine_backend import EngineBackend
from peagle.server.http.cache_salt import derive_salt
from peagle.server.http.logs import request_log_fields
from peagle.server.http.schema import ChatRequest
from peagle.server.openai.answer import Answer
from peagle.server.openai.answer_format import answer_format
from peagle.server.openai.chat_tools import answer_rules, chat_tools
from peagle.server.openai.choice import Choice
from peagle.server.openai.prompts import encode_chat
from peagle.server.openai.submit import submit
from peagle.server.parsing.answer_parser import AnswerParser
from peagle.server.parsing.answer_part import AnswerPart, Content, ToolCallArguments, ToolCallStart
from peagle.server.parsing.formats.call_object import is_loadable
from peagle.server.parsing.parsed_message import ParsedMessage

if TYPE_CHECKING:
    from peagle.engine.stream import StreamPiece


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """What one piece of a choice adds to its message."""

    choice: Choice
    piece: "StreamPiece"
    parts: list[AnswerPart]


class ChatAnswer:
    def __init__(
        self,
        answer: Answer,
        parsers: list[AnswerParser],
        parallel_calls: bool = True,
        calls_only: bool = False,
    ) -> None:
        """`parsers`: one for each choice. Without `parallel_calls`, only the first call counts.

        `calls_only`: a grammar allows no text beside calls. If there is some, it is part of a
        call that was cut off, and is dropped.
        """
        self.answer = answer
        self.messages = [ParsedMessage() for _ in answer.choices]
        self._parsers = parsers
        self._parallel_calls = parallel_calls
        self._calls_only = calls_only

    async def next(self, single: bool = False) -> ChatPiece | None:
        """The next piece, of any choice; None when all choices have finished."""
        arrived = await self.answer.next(single)
        if arrived is None:
            return None
        choice, piece = arrived
        return ChatPiece(choice, piece, self.parse(choice, piece))

    async def wait(self) -> None:
        """Wait until all choices have finished."""
        while await self.next(single=True) is not None:
            pass

    def parse(self, choice: Choice, piece: "StreamPiece") -> list[AnswerPart]:
        """The parts that a piece of the answer completes; for callers that do not use `next`."""
        return self._parse(choice, piece.text, piece.reason is not None)

    def parse_whole(self, choice: Choice) -> ParsedMessage:
        """The message of a choice that has finished, none of whose pieces was parsed."""
        self._parse(choice, choice.text, True)
        return self.messages[choice.index]

    def finish_reason(self, choice: Choice) -> str | None:
        """OpenAI's reason: an answer that ends with tool calls has one of its own.

        A call that `stop` or `stop_token_ids` cuts off is none that a client can make.
        """
        calls = self.messages[choice.index].tool_calls
        if choice.finish_reason == "stop" and calls and is_loadable(calls[-1].arguments):
            return "tool_calls"
        return choice.finish_reason

    def _parse(self, choice: Choice, text: str, ended: bool) -> list[AnswerPart]:
        parser = self._parsers[choice.index]
        parts = parser.push(text)
        if ended:
            parts += parser.finish()
        if not self._parallel_calls:
            parts = [part for part in parts if not is_further_call(part)]
        if self._calls_only:
            parts = [part for part in parts if not isinstance(part, Content)]
        for part in parts:
            self.messages[choice.index].add(part)
        return parts


def is_further_call(part: AnswerPart) -> bool:
    return isinstance(part, ToolCallStart | ToolCallArguments) and part.index > 0


async def start_chat(request: Request, backend: EngineBackend, body: ChatRequest) -> ChatAnswer:
    """Submit a chat request. The caller closes `answer` in any case."""
    form = answer_format(backend)
    if backend.settings.log_prompts:
        messages = [message.for_template() for message in body.messages]
        request_log_fields(request.scope)["prompt"] = messages
    prompt = await encode_chat(backend, body.messages, body.template_kwargs, tools=body.shown_tools)
    tools = await chat_tools(backend, body, form)
    rules = answer_rules(body, form, tools, prompt.ending)
    salt = derive_salt(request.scope, body.cache_salt)
    learn = backend.learn_consent.allows(request.scope, body)
    answer = await submit(backend, body, [prompt.ids], salt, rules, learn)
    parsers = [
        form.parser(tools.tools, tools.grammar is not None, form.is_thinking(prompt.ending))
        for _ in answer.choices
    ]
    # Harmony allows messages before a forced call.
    calls_only = tools.choice.kind in ("required", "function") and not form.is_harmony
    return ChatAnswer(answer, parsers, tools.choice.parallel, calls_only)
