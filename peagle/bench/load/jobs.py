"""The load: so many users, each sends a request, waits for its answer, and sends the next.

A job is one conversation. Its turns are requests of the same user one after the other, each with the model's own
answers before it. Every cell gets the same jobs, in the same order, with the same seeds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from peagle.data.bench import TURN_SEEDS, Task

Messages = list[dict[str, str]]
Seen = Callable[[], None]  # called after every request


@dataclass(frozen=True, slots=True)
class LoadJob:
    task: Task
    seed: int
    max_tokens: int
    ignore_eos: bool = False

    def messages(self, answers: Sequence[str]) -> Messages:
        """What is sent for the turn after these answers."""
        said: Messages = (
            [] if self.task.system is None else [{"role": "system", "content": self.task.system}]
        )
        for turn, answer in zip(self.task.turns, answers, strict=False):
            said += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        return [*said, {"role": "user", "content": self.task.turns[len(answers)]}]

    def turn_seed(self, turn: int) -> int:
        return self.seed + TURN_SEEDS * turn


@dataclass(slots=True)
class RequestRecord:
    """One request: when it was sent, when its pieces came (seconds), what they said."""

    task: str
    turn: int
    start: float
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    ids: list[int] = field(default_factory=list)  # where token ids are told
    text: str = ""
    error: str | None = None

    @property
    def seconds(self) -> float:
        return self.arrivals[-1] - self.start if self.arrivals else 0.0


def jobs_of(
    tasks: Sequence[Task],
    max_tokens: int,
    seed: int,
    ignore_eos: bool = False,
    lengths: Sequence[int] | None = None,
) -> list[LoadJob]:
    """`lengths`: answers of exactly so many tokens, whatever the model says."""
    if lengths is None:
        return [LoadJob(task, seed + i, max_tokens, ignore_eos) for i, task in enumerate(tasks)]
    return [
        LoadJob(task, seed + i, length, True)
        for i, (task, length) in enumerate(zip(tasks, lengths, strict=True))
    ]


def shortened(jobs: Sequence[LoadJob], count: int, tokens: int) -> list[LoadJob]:
    """For warming up: one turn each, a few tokens; over again where there are fewer than wanted."""
    picked = [jobs[i % len(jobs)] for i in range(count)] if tokens else []
    return [
        replace(
            job,
            task=replace(job.task, turns=job.task.turns[:1]),
            max_tokens=min(tokens, job.max_tokens),
        )
        for job in picked
    ]
