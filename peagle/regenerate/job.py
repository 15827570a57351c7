"""The job: the target answers every prompt; answers are written as they finish, and runs resume."""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from peagle.errors import UserError
from peagle.regenerate.answers import AnswerFile, Counts
from peagle.regenerate.batch_generator import BatchGenerator, BatchRequest, auto_slots, free_memory
from peagle.regenerate.conversation import Conversation
from peagle.regenerate.prompts import Prompt, write_prompts
from peagle.target import Target

VALIDATION_FILE = "validation.jsonl"
CAPACITY_MULTIPLE = 64  # slot capacities are multiples of it


class Progress(Protocol):
    def __call__(self, done: int, total: int, tokens: int) -> None: ...


def silent(done: int, total: int, tokens: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class RegenerateSettings:
    max_tokens: int = 512
    max_prompt: int = 1024  # longer prompts, history included, are dropped
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    slots: int | None = None  # None: as many as fit
    keep_truncated: bool = False  # keep answers cut at max_tokens, unless they repeat themselves
    prompts: str = ""  # digest of the file of prompts
    long: int = 0  # tokens of the longest conversation that prompts are joined to; 0: none is
    validation: int = 0  # prompts that are held out (prompts.py)
    endpoint: str | None = None
    model: str | None = None  # the endpoint's name for the target

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_prompt"):
            if getattr(self, name) < 1:
                raise UserError(f"`{name}` is {getattr(self, name)}: use 1 or more")
        if self.slots is not None and self.slots < 1:
            raise UserError(f"`slots` is {self.slots}: use auto, or 1 or more")

    def identity(self, target: Target) -> dict[str, Any]:
        """The settings that change answers: a job resumes only with the same ones."""
        return {
            "target": target.name,
            "revision": target.revision,
            "dtype": str(target.dtype).removeprefix("torch."),
            "context": target.rope_context,
            "endpoint": self.endpoint,
            "model": self.model,
            "prompts": self.prompts,
            "max_tokens": self.max_tokens,
            "max_prompt": self.max_prompt,
            "temperatures": list(self.temperatures),
            "seed": self.seed,
            "keep_truncated": self.keep_truncated,
        } | {
            name: value
            for name, value in (("long", self.long), ("validation", self.validation))
            if value
        }

    def longest_prompt(self, target: Target) -> int:
        if self.max_tokens >= target.context:
            raise UserError(
                f"`max_tokens` {self.max_tokens} leaves no room for a prompt:"
                f" the context is {target.context}"
            )
        return min(self.max_prompt, target.context - self.max_tokens)


def regenerate(
    target: Target,
    prompts: Sequence[Prompt],
    out: Path,
    settings: RegenerateSettings,
    progress: Progress = silent,
    stop_after: float = math.inf,
    held_out: Sequence[Prompt] = (),
) -> Counts:
    """Write the answers to all `prompts` to out/answers.jsonl; call it again after an interruption.

    After `stop_after` seconds it ends: an answer that is not finished is not written, but the
    answers to earlier turns of its conversation are. With 0 seconds nothing is answered.

    The prompts `held_out` are written to out/validation.jsonl, once the settings are accepted.

    A line: {"key", "source", "temperature", "messages", "ids", "spans"}; see answers.py and
    conversation.py.
    """
    start = time.perf_counter()
    with AnswerFile(Path(out).expanduser(), settings.identity(target)) as answers:
        if held_out:
            write_prompts(held_out, answers.path.with_name(VALIDATION_FILE))
        open_prompts = [prompt for prompt in prompts if prompt.key not in answers.settled]
        answers.counts.resumed = len(prompts) - len(open_prompts)
        if stop_after <= 0:
            open_prompts = []
        if open_prompts and settings.endpoint:
            from peagle.regenerate.endpoint import ask_all

            ask_all(target, open_prompts, answers, settings, progress, start + stop_after)
        elif open_prompts:
            answer_all(target, open_prompts, answers, settings, progress, start + stop_after)
        answers.counts.seconds = time.perf_counter() - start
        return answers.counts


def answer_all(
    target: Target,
    prompts: Sequence[Prompt],
    answers: AnswerFile,
    settings: RegenerateSettings,
    progress: Progress,
    deadline: float = math.inf,
) -> None:
    """Answer on this machine, in batches, until `deadline` (of time.perf_counter)."""
    max_prompt = settings.longest_prompt(target)
    capacity = max_prompt + settings.max_tokens
    capacity = min(target.context, -(-capacity // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE)
    slots = min(settings.slots or auto_slots(target, capacity, len(prompts)), len(prompts))
    generator = BatchGenerator(target, slots, capacity, settings.seed)
    turns = Turns(target, prompts, answers, max_prompt, settings)

    def on_step(tokens: int) -> None:
        answers.counts.generated = tokens
        progress(answers.counts.settled, len(prompts), tokens)

    for answer in generator.run(turns, on_step):
        conversation: Conversation = answer.key
        conversation.add_answer(answer, target)
        if conversation.over:
            turns.write(conversation)
        else:
            turns.waiting.append(conversation)
        if time.perf_counter() > deadline:
            turns.cut()
            break
    on_step(generator.finished_tokens)
    del generator
    free_memory()


class Turns:
    """The requests of all conversations; a turn is ready when the one before it is answered."""

    def __init__(
        self,
        target: Target,
        prompts: Iterable[Prompt],
        answers: AnswerFile,
        max_prompt: int,
        settings: RegenerateSettings,
    ) -> None:
        self.target = target
        self.answers = answers
        self.max_prompt = max_prompt
        self.settings = settings
        self.prompts = iter(prompts)
        self.waiting: deque[Conversation] = deque()
        self.open: dict[str, Conversation] = {}  # by key: begun and not written

    def __iter__(self) -> Iterator[BatchRequest]:
        return self

    def __next__(self) -> BatchRequest:
        while True:
            conversation = self.waiting.popleft() if self.waiting else self._start()
            ids = conversation.next_prompt(self.target, self.max_prompt)
            if ids is not None:
                return BatchRequest(
                    conversation, ids, self.settings.max_tokens, conversation.prompt.temperature
                )
            self.write(conversation)

    def _start(self) -> Conversation:
        settings = self.settings
        conversation = Conversation(
            next(self.prompts), settings.keep_truncated, bool(settings.long)
        )
        self.open[conversation.prompt.key] = conversation
        return conversation

    def write(self, conversation: Conversation) -> None:
        """Write the conversation, answered or dropped."""
        del self.open[conversation.prompt.key]
        if lines := conversation.lines():
            self.answers.keep(lines)
        else:
            assert conversation.ended is not None
            self.answers.drop(conversation.prompt.key, conversation.ended)

    def cut(self) -> None:
        """Time is up: write the open conversations that have an answer, up to their last one."""
        for conversation in [c for c in self.open.values() if c.documents]:
            conversation.ended = "time"
            self.write(conversation)
