"""The job: every prompt answered by the target itself, written down as it goes, resumed to the record."""

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
from peagle.regenerate.prompts import Prompt
from peagle.target import Target

ROUND = 64  # capacities are multiples of it


class Progress(Protocol):
    def __call__(self, done: int, total: int, tokens: int) -> None: ...


def silent(done: int, total: int, tokens: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class RegenerateSettings:
    max_tokens: int = 512
    max_prompt: int = 1024  # longer prompts are dropped, history included
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    slots: int | None = None  # None: what fits
    keep_truncated: bool = (
        False  # answers cut at max_tokens are kept, unless they repeat themselves
    )
    prompts: str = ""  # the digest of the prompts' file
    endpoint: str | None = None
    model: str | None = None  # the endpoint's name for the target

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_prompt"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}: use 1 or more"
                )
        if self.slots is not None and self.slots < 1:
            raise UserError(f"--slots is {self.slots}: use auto, or 1 or more")

    def identity(self, target: Target) -> dict[str, Any]:
        """What changes answers: a job is resumed only with the same."""
        return {
            "target": target.name,
            "revision": target.revision,
            "dtype": str(target.dtype).removeprefix("torch."),
            "endpoint": self.endpoint,
            "model": self.model,
            "prompts": self.prompts,
            "max_tokens": self.max_tokens,
            "max_prompt": self.max_prompt,
            "temperatures": list(self.temperatures),
            "seed": self.seed,
            "keep_truncated": self.keep_truncated,
        }

    def longest_prompt(self, target: Target) -> int:
        if self.max_tokens >= target.context:
            raise UserError(
                f"--max-tokens {self.max_tokens} leaves no room for a prompt: the context is {target.context}"
            )
        return min(self.max_prompt, target.context - self.max_tokens)


def regenerate(
    target: Target,
    prompts: Sequence[Prompt],
    out: Path,
    settings: RegenerateSettings,
    progress: Progress = silent,
) -> Counts:
    """Answers to all `prompts` lie in out/answers.jsonl when it returns; stopped at any point, it can be called again.

    A line: {"key", "source", "temperature", "messages", "ids", "spans"}; see answers.py and conversation.py.
    """
    start = time.perf_counter()
    with AnswerFile(Path(out).expanduser(), settings.identity(target)) as answers:
        left = [prompt for prompt in prompts if prompt.key not in answers.settled]
        answers.counts.resumed = len(prompts) - len(left)
        if left and settings.endpoint:
            from peagle.regenerate.endpoint import ask_all

            ask_all(target, left, answers, settings, progress)
        elif left:
            answer_all(target, left, answers, settings, progress)
        answers.counts.seconds = time.perf_counter() - start
        return answers.counts


def answer_all(
    target: Target,
    prompts: Sequence[Prompt],
    answers: AnswerFile,
    settings: RegenerateSettings,
    progress: Progress,
) -> None:
    """The target answers on this machine, in batches."""
    longest = settings.longest_prompt(target)
    capacity = longest + settings.max_tokens
    capacity = min(target.context, -(-capacity // ROUND) * ROUND)
    slots = min(settings.slots or auto_slots(target, capacity, len(prompts)), len(prompts))
    generator = BatchGenerator(target, slots, capacity, settings.seed)
    turns = Turns(target, prompts, answers, longest, settings)

    def on_step(tokens: int) -> None:
        answers.counts.generated = tokens
        progress(answers.counts.settled, len(prompts), tokens)

    for answer in generator.run(turns, on_step):
        conversation: Conversation = answer.key
        conversation.take(answer, target)
        if conversation.over:
            turns.settle(conversation)
        else:
            turns.waiting.append(conversation)
    on_step(generator.made)
    del generator
    free_memory()


class Turns:
    """The requests of all conversations: a later turn comes up when the one before it is answered."""

    def __init__(
        self,
        target: Target,
        prompts: Iterable[Prompt],
        answers: AnswerFile,
        longest: int,
        settings: RegenerateSettings,
    ) -> None:
        self.target, self.answers, self.longest, self.settings = target, answers, longest, settings
        self.fresh = iter(prompts)
        self.waiting: deque[Conversation] = deque()

    def __iter__(self) -> Iterator[BatchRequest]:
        return self

    def __next__(self) -> BatchRequest:
        while True:
            conversation = self.waiting.popleft() if self.waiting else self._new()
            ids = conversation.ask(self.target, self.longest)
            if ids is not None:
                return BatchRequest(
                    conversation, ids, self.settings.max_tokens, conversation.prompt.temperature
                )
            self.settle(conversation)

    def _new(self) -> Conversation:
        return Conversation(next(self.fresh), self.settings.keep_truncated)

    def settle(self, conversation: Conversation) -> None:
        """Written down, answered or dropped."""
        if lines := conversation.lines():
            self.answers.keep(lines)
        else:
            assert conversation.ended is not None
            self.answers.drop(conversation.prompt.key, conversation.ended)
