"""Conversation: the user turns of a prompt, the target's answers, and the exact ids of both."""

from dataclasses import dataclass, field
from typing import Any

from peagle.data.chat import Messages, encode_prompt
from peagle.errors import UserError
from peagle.regenerate.batch_generator import BatchAnswer
from peagle.regenerate.prompts import Prompt
from peagle.regenerate.repetition import is_repetitive
from peagle.target import Target

DROP_REASONS = {"length": "truncated", "loop": "looping"}


@dataclass(slots=True)
class Document:
    """Prompt ids and generated ids as they were; text is never tokenized again.

    `spans`: [start, end) of each answer in `ids`.
    """

    ids: list[int]
    spans: list[tuple[int, int]]
    messages: Messages


@dataclass(slots=True)
class Conversation:
    """Complete answers are kept, whatever ends the conversation after them."""

    prompt: Prompt
    keep_truncated: bool = False
    continue_truncated: bool = False  # a truncated answer that is kept does not end it
    messages: Messages = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)  # ids of the current prompt
    answers: int = 0
    ended: str | None = None  # why it ended before its last turn was answered

    @property
    def over(self) -> bool:
        return self.ended is not None or self.answers == len(self.prompt.turns)

    def next_prompt(self, target: Target, max_tokens: int) -> list[int] | None:
        """The ids of the next turn's prompt; None if it does not fit into `max_tokens` tokens."""
        self.messages.append({"role": "user", "content": self.prompt.turns[self.answers]})
        try:
            self.prompt_ids = encode_prompt(target, self.messages)
        except UserError:  # A fault of the target, not of this prompt.
            raise
        except ValueError:
            self.ended = "template"
            return None
        if len(self.prompt_ids) > max_tokens:
            self.ended = "too long"
            return None
        return self.prompt_ids

    def add_answer(self, answer: BatchAnswer, target: Target) -> None:
        """Add the answer to the last document if the prompt begins with it, else to a new one.

        Most templates repeat the history as it was. A template that does not, such as one that
        drops old reasoning, makes a document of every turn.
        """
        answer_ids = answer.ids[:-1] if answer.reason == "stop" else answer.ids
        text = target.tokenizer.decode(answer_ids, skip_special_tokens=True)
        self.ended = DROP_REASONS.get(answer.reason) or (None if text.strip() else "empty")
        keep = self.ended == "truncated" and self.keep_truncated and not is_repetitive(answer.ids)
        if self.ended and not keep:
            return
        if self.continue_truncated:
            self.ended = None
        self.answers += 1
        self.messages.append({"role": "assistant", "content": text})
        ids = self.prompt_ids + answer.ids
        span = (len(self.prompt_ids), len(ids))
        last_ids = self.documents[-1].ids if self.documents else None
        continues = last_ids is not None and self.prompt_ids[: len(last_ids)] == last_ids
        spans = [*self.documents.pop().spans, span] if continues else [span]
        self.documents.append(Document(ids, spans, list(self.messages)))

    def lines(self) -> list[dict[str, Any]]:
        """The JSON lines of the conversation; none if no turn was answered."""
        parts = len(self.documents)
        head = {"source": self.prompt.source, "temperature": self.prompt.temperature}
        tail = {"cut": self.ended} if self.ended else {}
        return [
            {"key": f"{self.prompt.key}#{i}" if parts > 1 else self.prompt.key}
            | head
            | {"messages": document.messages, "ids": document.ids, "spans": document.spans}
            | ({"part": [i, parts]} if parts > 1 else {})
            | tail
            for i, document in enumerate(self.documents, start=1)
        ]
