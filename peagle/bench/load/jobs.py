"""LoadJob: one conversation of a closed-loop load.

Each of N users sends a request, waits for its answer, and sends the next. The turns of a job are
requests of the same user, each with the model's own answers to the turns before it. Every cell gets
the same jobs, in the same order, with the same seeds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from peagle.data.bench import TURN_SEEDS, Task

Messages = list[dict[str, str]]
OnRequest = Callable[[], None]  # called after every request


@dataclass(frozen=True, slots=True)
class LoadJob:
    task: Task
    seed: int
    max_tokens: int
    ignore_eos: bool = False

    def messages(self, answers: Sequence[str]) -> Messages:
        """The chat messages of the turn after these answers."""
        system = self.task.system
        messages: Messages = [] if system is None else [{"role": "system", "content": system}]
        for turn, answer in zip(self.task.turns, answers, strict=False):
            messages.append({"role": "user", "content": turn})
            messages.append({"role": "assistant", "content": answer})
        return [*messages, {"role": "user", "content": self.task.turns[len(answers)]}]

    def turn_seed(self, turn: int) -> int:
        return self.seed + TURN_SEEDS * turn


def make_jobs(
    tasks: Sequence[Task],
    max_tokens: int,
    seed: int,
    ignore_eos: bool = False,
    lengths: Sequence[int] | None = None,
) -> list[LoadJob]:
    """One job for each task. `lengths` forces the number of tokens of each answer."""
    if lengths is None:
        return [LoadJob(task, seed + i, max_tokens, ignore_eos) for i, task in enumerate(tasks)]
    return [
        LoadJob(task, seed + i, length, ignore_eos=True)
        for i, (task, length) in enumerate(zip(tasks, lengths, strict=True))
    ]


def warmup_jobs(jobs: Sequence[LoadJob], count: int, tokens: int) -> list[LoadJob]:
    """`count` jobs of one turn and at most `tokens` tokens; jobs repeat where there are fewer."""
    if not tokens:
        return []
    return [
        replace(
            job,
            task=replace(job.task, turns=job.task.turns[:1]),
            max_tokens=min(tokens, job.max_tokens),
        )
        for job in (jobs[i % len(jobs)] for i in range(count))
    ]
