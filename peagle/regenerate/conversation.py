"""One conversation under way: a prompt's user turns, the target's answers, and the exact ids of both."""

from dataclasses import dataclass, field
from typing import Any

from peagle.data.chat import Messages, encode_prompt
from peagle.errors import UserError
from peagle.regenerate.batch_generator import BatchAnswer
from peagle.regenerate.loops import repetitive
from peagle.regenerate.prompts import Prompt
from peagle.target import Target

REASONS = {"length": "truncated", "loop": "looping"}


@dataclass(slots=True)
class Document:
    """Prompt ids and generated ids as they were, never text that is tokenized again; spans [start, end) of answers."""

    ids: list[int]
    spans: list[tuple[int, int]]
    messages: Messages


@dataclass(slots=True)
class Conversation:
    """Answers that are whole are kept, whatever ends the conversation after them."""

    prompt: Prompt
    keep_truncated: bool = False
    messages: Messages = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)  # the prompt that is being answered
    answers: int = 0
    ended: str | None = None  # why it came to an end before its last turn was answered

    @property
    def over(self) -> bool:
        return self.ended is not None or self.answers == len(self.prompt.turns)

    def ask(self, target: Target, longest: int) -> list[int] | None:
        """The ids of the next turn's prompt; None where it has none of at most `longest` tokens."""
        self.messages.append({"role": "user", "content": self.prompt.turns[self.answers]})
        try:
            self.asked = encode_prompt(target, self.messages)
        except UserError:  # concerns every prompt
            raise
        except ValueError:
            self.ended = "template"
            return None
        if len(self.asked) > longest:
            self.ended = "too long"
            return None
        return self.asked

    def take(self, answer: BatchAnswer, target: Target) -> None:
        """Adds the answer: to the last document where the prompt begins with all of it, else to a new one.

        Most templates write history as it was; one that does not, as those that leave out old reasoning, makes a
        document of every turn.
        """
        said = answer.ids[:-1] if answer.reason == "stop" else answer.ids
        text = target.tokenizer.decode(said, skip_special_tokens=True)
        self.ended = REASONS.get(answer.reason) or (None if text.strip() else "empty")
        kept = self.ended == "truncated" and self.keep_truncated and not repetitive(answer.ids)
        if self.ended and not kept:
            return
        self.answers += 1
        self.messages.append({"role": "assistant", "content": text})
        ids, span = self.asked + answer.ids, (len(self.asked), len(self.asked) + len(answer.ids))
        grows = (
            self.documents and self.asked[: len(self.documents[-1].ids)] == self.documents[-1].ids
        )
        spans = [*self.documents.pop().spans, span] if grows else [span]
        self.documents.append(Document(ids, spans, list(self.messages)))

    def lines(self) -> list[dict[str, Any]]:
        """What is written of it; nothing where no turn was answered."""
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
