"""The target's own answers to benchmark tasks, in batches: what acceptance.py walks along."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from peagle.data.bench import Task
from peagle.data.chat import Messages, encode_prompt
from peagle.errors import UserError
from peagle.regenerate.batch_generator import BatchGenerator, BatchRequest, auto_slots, free_memory
from peagle.target import Target
from peagle.train.data.documents import Documents, join


@dataclass(slots=True)
class Talk:
    """A task under way: one document a turn."""

    task: Task
    messages: Messages = field(default_factory=list)
    turn: int = 0
    asked: list[int] = field(default_factory=list)  # the prompt that is being answered

    def ask(self, target: Target) -> list[int]:
        if not self.messages and self.task.system:
            self.messages.append({"role": "system", "content": self.task.system})
        self.messages.append({"role": "user", "content": self.task.turns[self.turn]})
        try:
            self.asked = encode_prompt(target, self.messages)
            return self.asked
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"task {self.task.id}: {error}") from error


class Talks:
    """Requests of all tasks; a second turn comes up when the first is answered. What cannot be asked is `skipped`."""

    def __init__(
        self, target: Target, tasks: Sequence[Task], max_tokens: int, temperature: float
    ) -> None:
        self.target, self.max_tokens, self.temperature = target, max_tokens, temperature
        self.waiting = deque(Talk(task) for task in tasks)
        self.skipped = 0  # turns

    def __iter__(self) -> Iterator[BatchRequest]:
        return self

    def __next__(self) -> BatchRequest:
        while self.waiting:
            talk = self.waiting.popleft()
            ids = talk.ask(self.target)
            room = self.target.context - len(ids)
            if room > 1:
                return BatchRequest(talk, ids, min(self.max_tokens, room), self.temperature)
            self.skipped += len(talk.task.turns) - talk.turn
        raise StopIteration


def answer_tasks(
    target: Target,
    tasks: Sequence[Task],
    max_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[Documents, int]:
    """A document for each turn of each task, its prompt and the target's answer, loops and all; and how many turns did
    not fit the context."""
    talks = Talks(target, tasks, max_tokens, temperature)
    words = ["".join([task.system or "", *task.turns]) for task in tasks]
    longest = max(len(text.encode()) for text in words) + 256  # a token has a byte at least
    turns = max(len(task.turns) for task in tasks)
    capacity = min(target.context, longest + turns * max_tokens + 64)
    slots = auto_slots(target, capacity, len(tasks))
    parts = []
    for answer in BatchGenerator(target, slots, capacity, seed, stop_loops=False).run(talks):
        talk: Talk = answer.key
        ids = np.array(talk.asked + answer.ids)
        parts.append(
            (ids, np.arange(len(ids)) >= len(ids) - len(answer.ids), f"{talk.task.id}#{talk.turn}")
        )
        said = answer.ids[:-1] if answer.ids[-1] in target.stop_ids else answer.ids
        talk.messages.append(
            {
                "role": "assistant",
                "content": target.tokenizer.decode(said, skip_special_tokens=True),
            }
        )
        talk.turn += 1
        if talk.turn < len(talk.task.turns):
            talks.waiting.append(talk)
    free_memory()
    return join(parts), talks.skipped
