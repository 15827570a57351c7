"""The acceptance length by decoding: every task of a set is decoded and every step counted.

The acceptance length of a set is 1 + accepted / drafts over all its steps, not a mean over tasks: a
long answer has more weight than a short one. The mean over sets gives every set the same weight.

Steps that do not come from decoding (`Step`s with `drafted` and `accepted`) need only `summarize`.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from peagle.core import Generation, Method, Sampling, Step, check_k, parse_method
from peagle.data.bench import TURN_SEEDS, Task
from peagle.data.long_prompts import prompt_messages
from peagle.data.records import Report, ignore
from peagle.draft_shape import check_tree_nodes
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.loaded import LoadedPair

Advance = Callable[[str], None]  # called after every task with a description of it


@dataclass(frozen=True, slots=True)
class EvaluateSettings:
    ks: tuple[int, ...]
    temperatures: tuple[float, ...] = (0.0,)
    method: Method = "p-eagle"
    max_tokens: int = 256
    seed: int = 0
    exact: bool | None = None
    int8: bool = False
    tree: int = 0  # nodes of a tree; 0: chains

    def __post_init__(self) -> None:
        for k in self.ks:
            check_k(k)
        for temperature in self.temperatures:
            Sampling(temperature, seed=self.seed)
        if parse_method(self.method) == "none":
            raise UserError(
                "nothing is drafted with `method` none: evaluate p-eagle, eagle3 or ngram"
            )
        check_tree_nodes(self.tree, self.ks, self.method)
        if self.max_tokens < 2:  # The prefill gives the first token: no draft is made for it.
            raise UserError(f"`max_tokens` is {self.max_tokens}: nothing is drafted below 2 tokens")


@dataclass(frozen=True, slots=True)
class SetResult:
    """One set at one K and temperature."""

    k: int
    drafts: int  # passes that drafted any token
    draft_tokens: int
    accepted: int
    tokens: int  # of the answers, with the first token of each
    # Position i (from 0): the fraction of passes that accepted draft i + 1.
    accepted_per_position: tuple[float, ...]
    set: str = ""
    temperature: float = 0.0
    tasks: int = 0
    skipped: int = 0  # turns that do not fit the context
    exact: bool = False
    seconds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    def as_dict(self) -> dict[str, Any]:
        first = {
            "set": self.set,
            "k": self.k,
            "temperature": self.temperature,
            "acceptance_length": round(self.acceptance_length, 4),
        }
        rounded = {
            "accepted_per_position": [round(share, 4) for share in self.accepted_per_position],
            "seconds": round(self.seconds, 2),
        }
        return first | asdict(self) | rounded


@dataclass(frozen=True, slots=True)
class Evaluation:
    pair: str
    target: str
    dtype: str
    trained: bool
    settings: EvaluateSettings
    results: tuple[SetResult, ...]

    def of(self, k: int, temperature: float) -> list[SetResult]:
        """The result of every set at that K and temperature."""
        return [
            result for result in self.results if (result.k, result.temperature) == (k, temperature)
        ]

    def mean(self, k: int, temperature: float) -> float:
        """The mean acceptance length over the sets."""
        results = self.of(k, temperature)
        return sum(result.acceptance_length for result in results) / len(results)

    def as_dict(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "pair": self.pair,
            "target": self.target,
            "method": settings.method,
            "trained": self.trained,
            "dtype": self.dtype,
            "int8": settings.int8,
            "tree": settings.tree,
            "max_tokens": settings.max_tokens,
            "seed": settings.seed,
            "results": [result.as_dict() for result in self.results],
            "mean": [
                {"k": k, "temperature": t, "acceptance_length": round(self.mean(k, t), 4)}
                for t in settings.temperatures
                for k in settings.ks
            ],
        }


def summarize(steps: Iterable[Step], k: int) -> SetResult:
    """Count all steps. A pass near the end of the context may draft fewer than k tokens."""
    drafted = [0] * k
    accepted = [0] * k
    drafts = 0
    tokens = 0
    for step in steps:
        tokens += len(step.tokens)
        drafts += step.drafted > 0
        for i in range(step.drafted):
            drafted[i] += 1
            accepted[i] += step.accepted > i
    shares = tuple(
        hits / count if count else 0.0 for hits, count in zip(accepted, drafted, strict=True)
    )
    return SetResult(k, drafts, sum(drafted), sum(accepted), tokens, shares)


def evaluate(
    loaded: "LoadedPair",
    sets: Mapping[str, list[Task]],
    settings: EvaluateSettings,
    report: Report = ignore,
    advance: Advance = ignore,
) -> Evaluation:
    """Decode every set at every temperature and K; `report` gets a line for each skipped turn."""
    # A drafter that cannot be loaded is an error before anything is decoded.
    trained = settings.method == "ngram" or loaded.drafter(settings.method).config.trained
    require_fitting_prompts(loaded, sets)
    results = [
        measure(loaded, name, tasks, k, temperature, settings, report, advance)
        for name, tasks in sets.items()
        for temperature in settings.temperatures
        for k in settings.ks
    ]
    return Evaluation(
        pair=loaded.pair.name,
        target=loaded.target.name or "",
        dtype=str(loaded.target.dtype).removeprefix("torch."),
        trained=trained,
        settings=settings,
        results=tuple(results),
    )


def require_fitting_prompts(loaded: "LoadedPair", sets: Mapping[str, list[Task]]) -> None:
    """Refuse a set without any prompt that fits the context: nothing would be measured."""
    for name, tasks in sets.items():
        if not any(fits_context(loaded, loaded.encode(prompt_messages(task))) for task in tasks):
            raise UserError(
                f"no prompt of {name} fits the context of {loaded.target.context} tokens:"
                " give a set with shorter prompts, or load the pair with a longer context"
            )


def fits_context(loaded: "LoadedPair", ids: list[int]) -> bool:
    """Whether a drafted token has room behind the prompt and the first token of the answer."""
    return len(ids) + 1 < loaded.target.context


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
    """Decode one set at one K and temperature."""
    started = time.perf_counter()
    answers: list[Generation] = []
    skipped = 0
    for number, task in enumerate(tasks):
        turns = answer(loaded, task, k, temperature, settings.seed + number, settings)
        answers += turns
        if missing := len(task.turns) - len(turns):
            skipped += missing
            report(
                f"{name}, task {task.id}: turn {len(turns) + 1} does not fit the context,"
                f" {missing} skipped"
            )
        advance(f"{name} K={k} T={temperature:g}")
    return replace(
        summarize((step for generation in answers for step in generation.steps), k),
        set=name,
        temperature=temperature,
        tasks=len(tasks),
        skipped=skipped,
        exact=bool(answers) and all(generation.exact for generation in answers),
        seconds=time.perf_counter() - started,
    )


def answer(
    loaded: "LoadedPair",
    task: Task,
    k: int,
    temperature: float,
    seed: int,
    settings: EvaluateSettings,
) -> list[Generation]:
    """The target's answer to each turn of a task, until a turn does not fit the context."""
    messages = [{"role": "system", "content": task.system}] if task.system is not None else []
    answers: list[Generation] = []
    for turn in task.turns:
        messages.append({"role": "user", "content": turn})
        ids = loaded.encode(messages)
        if not fits_context(loaded, ids):
            break
        generation = loaded.generate(
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
        messages.append({"role": "assistant", "content": generation.text})
        answers.append(generation)
    return answers
