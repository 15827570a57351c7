"""Acceptance length as it really is: every task of a set decoded, every step counted.

The acceptance length of a set is 1 + accepted / drafts over all its steps, not a mean of the tasks' own: a long answer
weighs more than a short one. The mean over sets gives every set the same weight.

Whoever gets steps in another way than by decoding (`Step`s with `drafted` and `accepted`) needs only `summarize`.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from peagle.core import Generation, Method, Sampling, Step, check_k, parse_method
from peagle.data.bench import TURN_SEEDS, Task
from peagle.data.records import Report, ignore
from peagle.draft_shape import check_tree_nodes
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.loaded import LoadedPair

Advance = Callable[[str], None]  # called with what was decoded, after every task


@dataclass(frozen=True, slots=True)
class EvaluateSettings:
    ks: tuple[int, ...]
    temperatures: tuple[float, ...] = (0.0,)
    method: Method = "p-eagle"
    max_tokens: int = 256
    seed: int = 0
    exact: bool | None = None
    int8: bool = False
    tree: int = 0  # nodes; 0: chains

    def __post_init__(self) -> None:
        for k in self.ks:
            check_k(k)
        for temperature in self.temperatures:
            Sampling(temperature, seed=self.seed)
        if parse_method(self.method) == "none":
            raise UserError("nothing is drafted with --method none: evaluate p-eagle or eagle3")
        check_tree_nodes(self.tree, self.ks, self.method, self.exact)
        if self.max_tokens < 2:  # the first token is the prefill's: nothing is drafted for it
            raise UserError(
                f"max_tokens is {self.max_tokens}: nothing is drafted below --max-tokens 2"
            )


@dataclass(frozen=True, slots=True)
class SetResult:
    """One set at one K and temperature. Position i (from 0): the share of passes that accepted draft i + 1."""

    k: int
    drafts: int  # passes that drafted anything
    draft_tokens: int
    accepted: int
    tokens: int  # of the answers, each one's first included
    accepted_per_position: tuple[float, ...]
    set: str = ""
    temperature: float = 0.0
    tasks: int = 0
    skipped: int = 0  # turns that did not fit the context
    exact: bool = False
    seconds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    def as_dict(self) -> dict[str, Any]:
        shares = [round(share, 4) for share in self.accepted_per_position]
        first = {"set": self.set, "k": self.k, "temperature": self.temperature}
        told = first | {"acceptance_length": round(self.acceptance_length, 4)} | asdict(self)
        return told | {"accepted_per_position": shares, "seconds": round(self.seconds, 2)}


@dataclass(frozen=True, slots=True)
class Evaluation:
    pair: str
    target: str
    dtype: str
    trained: bool
    settings: EvaluateSettings
    results: tuple[SetResult, ...]

    def of(self, k: int, temperature: float) -> list[SetResult]:
        """Every set's result at that K and temperature."""
        return [
            result for result in self.results if (result.k, result.temperature) == (k, temperature)
        ]

    def mean(self, k: int, temperature: float) -> float:
        found = self.of(k, temperature)
        return sum(result.acceptance_length for result in found) / len(found)

    def as_dict(self) -> dict[str, Any]:
        how = self.settings
        return {
            "pair": self.pair,
            "target": self.target,
            "method": how.method,
            "trained": self.trained,
            "dtype": self.dtype,
            "int8": how.int8,
            "tree": how.tree,
            "max_tokens": how.max_tokens,
            "seed": how.seed,
            "results": [result.as_dict() for result in self.results],
            "mean": [
                {"k": k, "temperature": t, "acceptance_length": round(self.mean(k, t), 4)}
                for t in how.temperatures
                for k in how.ks
            ],
        }


def summarize(steps: Iterable[Step], k: int) -> SetResult:
    """The counts over all steps. A pass near the end of the context may draft fewer than k."""
    tried, kept = [0] * k, [0] * k
    drafts = tokens = 0
    for step in steps:
        tokens += len(step.tokens)
        drafts += step.drafted > 0
        for i in range(step.drafted):
            tried[i] += 1
            kept[i] += step.accepted > i
    shares = tuple(good / of if of else 0.0 for good, of in zip(kept, tried, strict=True))
    return SetResult(k, drafts, sum(tried), sum(kept), tokens, shares)


def evaluate(
    loaded: "LoadedPair",
    sets: Mapping[str, list[Task]],
    settings: EvaluateSettings,
    report: Report = ignore,
    advance: Advance = ignore,
) -> Evaluation:
    """Decodes every set at every temperature and K. `report` receives a line for each turn that had to be skipped."""
    drafter = loaded.drafter(
        settings.method
    )  # what cannot be loaded is told before anything is decoded
    results = [
        measure(loaded, name, tasks, k, temperature, settings, report, advance)
        for name, tasks in sets.items()
        for temperature in settings.temperatures
        for k in settings.ks
    ]
    name, dtype = loaded.target.name or "", str(loaded.target.dtype).removeprefix("torch.")
    return Evaluation(
        loaded.pair.name, name, dtype, drafter.config.trained, settings, tuple(results)
    )


def measure(
    loaded: "LoadedPair",
    name: str,
    tasks: list[Task],
    k: int,
    temperature: float,
    settings: EvaluateSettings,
    report: Report = ignore,
    advance: Advance = ignore,
) -> SetResult:
    """One set at one K and temperature."""
    start, answers, skipped = time.perf_counter(), list[Generation](), 0
    for number, task in enumerate(tasks):
        got = answer(loaded, task, k, temperature, settings.seed + number, settings)
        answers += got
        if left := len(task.turns) - len(got):
            skipped += left
            report(
                f"{name}, task {task.id}: turn {len(got) + 1} does not fit the context, {left} skipped"
            )
        advance(f"{name} K={k} T={temperature:g}")
    return replace(
        summarize((step for one in answers for step in one.steps), k),
        set=name,
        temperature=temperature,
        tasks=len(tasks),
        skipped=skipped,
        exact=bool(answers) and all(one.exact for one in answers),
        seconds=time.perf_counter() - start,
    )


def answer(
    loaded: "LoadedPair",
    task: Task,
    k: int,
    temperature: float,
    seed: int,
    settings: EvaluateSettings,
) -> list[Generation]:
    """The target's answer to each turn, earlier turns and answers before it. Ends where the context does."""
    messages = [{"role": "system", "content": task.system}] if task.system is not None else []
    answers: list[Generation] = []
    for turn in task.turns:
        messages.append({"role": "user", "content": turn})
        ids = loaded.encode(messages)
        if len(ids) + 1 >= loaded.target.context:  # no room for a token that was drafted
            break
        got = loaded.generate(
            ids,
            k,
            settings.method,
            settings.max_tokens,
            exact=settings.exact,
            int8=settings.int8,
            tree=settings.tree,
            temperature=temperature,
            seed=seed + TURN_SEEDS * len(answers),
        )
        messages.append({"role": "assistant", "content": got.text})
        answers.append(got)
    return answers
