"""Reasoning that stands between tags before the answer: `<think>` of Qwen3, DeepSeek and SmolLM3.

Newlines at the beginning and at the end of the reasoning, and before the answer, belong to the tags
and are left out. An answer that never closes the tag is all reasoning. Tags later in the answer are
text. Harmony's channels are parsed by its tool format.
"""

from collections.abc import Generator
from dataclasses import dataclass

from peagle.errors import UserError, did_you_mean
from peagle.server.parsing.answer_parser import AnswerParser
from peagle.server.parsing.answer_part import AnswerPart, Reasoning
from peagle.server.parsing.answer_reader import AnswerReader


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    name: str
    start: str
    end: str


THINK_TAGS = ReasoningFormat("think-tags", "<think>", "</think>")
REASONING_FORMATS = {THINK_TAGS.name: THINK_TAGS}
VLLM_NAMES = {"qwen3": THINK_TAGS.name, "deepseek_r1": THINK_TAGS.name}


def find_reasoning_format(name: str) -> ReasoningFormat:
    """The format of this name, which may be one of vLLM's."""
    name = VLLM_NAMES.get(name, name)
    if name not in REASONING_FORMATS:
        known = [*REASONING_FORMATS, "none"]
        raise UserError(
            f"there is no reasoning parser {name!r}: use one of {', '.join(known)}."
            f"{did_you_mean(name, known)}"
        )
    return REASONING_FORMATS[name]


def detect_reasoning(chat_template: str) -> ReasoningFormat | None:
    """The tags that a chat template knows; None: its target does not reason in tags."""
    return THINK_TAGS if THINK_TAGS.end in chat_template else None


class ReasoningParser(AnswerReader):
    def __init__(
        self, format: ReasoningFormat, inner: AnswerParser, starts_inside: bool = False
    ) -> None:
        """`inner` parses what follows; `starts_inside`: the prompt has opened the tag."""
        super().__init__()
        self._format = format
        self._inner = inner
        self._starts_inside = starts_inside
        self._newlines = 0  # Held back: they are dropped if the reasoning ends here.

    def finish(self) -> list[AnswerPart]:
        return [*super().finish(), *self._inner.finish()]

    def _parse(self) -> Generator[None, None, None]:
        blank = yield from self._read_chars()
        opened = yield from self._read_one_of((self._format.start,))
        if opened or self._starts_inside:
            if not opened:
                self._give_reasoning(blank.lstrip("\n"))
            yield from self._read_chars("\n")
            yield from self._read_until((self._format.end,), self._give_reasoning)
            yield from self._read_chars("\n")
        else:
            self._give_answer(blank)
        while True:
            self._give_answer(self._pending)
            self._pending = ""
            yield

    def _give_reasoning(self, text: str) -> None:
        body = text.rstrip("\n")
        if body:
            self._parts.append(Reasoning("\n" * self._newlines + body))
            self._newlines = 0
        self._newlines += len(text) - len(body)

    def _give_answer(self, text: str) -> None:
        if text:
            self._parts += self._inner.push(text)
