"""The target's own answers to benchmark tasks, generated in batches (replay.py replays them)."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from peagle.data.bench import Task
from peagle.data.chat import Messages, encode_prompt
from peagle.errors import UserError
from peagle.regenerate.batch_generator import BatchGenerator, BatchRequest, auto_slots, free_memory
from peagle.target import Target
from peagle.train.data.documents import Document, Documents, join_documents

TEMPLATE_TOKENS = 256  # limit on the tokens that the chat template adds to the first prompt
TURN_TEMPLATE_TOKENS = 64  # the same for later turns


@dataclass(slots=True)
class TaskConversation:
    """The state of one task: each turn gives one document."""

    task: Task
    messages: Messages = field(default_factory=list)
    turn: int = 0
    prompt_ids: list[int] = field(default_factory=list)  # of the current turn

    def encode_turn(self, target: Target) -> list[int]:
        """Add the user message of the current turn and encode the conversation."""
        if not self.messages and self.task.system:
            self.messages.append({"role": "system", "content": self.task.system})
        self.messages.append({"role": "user", "content": self.task.turns[self.turn]})
        try:
            self.prompt_ids = encode_prompt(target, self.messages)
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"task {self.task.id}: {error}") from error
        return self.prompt_ids


class ConversationQueue:
    """The requests of all tasks; the next turn is queued when the one before is answered.

    Turns that do not fit the context are skipped and counted.
    """

    def __init__(
        self, target: Target, tasks: Sequence[Task], max_tokens: int, temperature: float
    ) -> None:
        self.target = target
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.waiting = deque(TaskConversation(task) for task in tasks)
        self.skipped_turns = 0

    def __iter__(self) -> Iterator[BatchRequest]:
        return self

    def __next__(self) -> BatchRequest:
        while self.waiting:
            conversation = self.waiting.popleft()
            ids = conversation.encode_turn(self.target)
            free_tokens = self.target.context - len(ids)
            if free_tokens > 1:
                max_tokens = min(self.max_tokens, free_tokens)
                return BatchRequest(conversation, ids, max_tokens, self.temperature)
            self.skipped_turns += len(conversation.task.turns) - conversation.turn
        raise StopIteration

    def add_answer(self, conversation: TaskConversation, ids: list[int]) -> Document:
        """Record the answer to the current turn and queue the next turn; returns the document."""
        tokens = np.array(conversation.prompt_ids + ids)
        answer_mask = np.arange(len(tokens)) >= len(tokens) - len(ids)
        document = Document(tokens, answer_mask, f"{conversation.task.id}#{conversation.turn}")
        text_ids = ids[:-1] if ids[-1] in self.target.stop_ids else ids
        text = self.target.tokenizer.decode(text_ids, skip_special_tokens=True)
        conversation.messages.append({"role": "assistant", "content": text})
        conversation.turn += 1
        if conversation.turn < len(conversation.task.turns):
            self.waiting.append(conversation)
        return document


def answer_tasks(
    target: Target,
    tasks: Sequence[Task],
    max_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
) -> tuple[Documents, int]:
    """A document for each turn of each task, and the number of turns that do not fit the context.

    Answers that loop are kept as they are.
    """
    queue = ConversationQueue(target, tasks, max_tokens, temperature)
    capacity = min(target.context, _max_conversation_tokens(tasks, max_tokens))
    slots = auto_slots(target, capacity, len(tasks))
    generator = BatchGenerator(target, slots, capacity, seed, stop_loops=False)
    documents = [queue.add_answer(answer.key, answer.ids) for answer in generator.run(queue)]
    free_memory()
    return join_documents(documents), queue.skipped_turns


def _max_conversation_tokens(tasks: Sequence[Task], max_tokens: int) -> int:
    """An upper limit, because a token has at least one byte."""
    texts = ["".join([task.system or "", *task.turns]) for task in tasks]
    prompt_tokens = max(len(text.encode()) for text in texts) + TEMPLATE_TOKENS
    turns = max(len(task.turns) for task in tasks)
    return prompt_tokens + turns * max_tokens + TURN_TEMPLATE_TOKENS
