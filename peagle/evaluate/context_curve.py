"""The acceptance length by context length: long prompts of a set, answered by the target.

A context of N tokens holds a prompt and an answer of `max_tokens`: the prompt has N - max_tokens
tokens. With decoding, every prompt is also answered without drafts, in alternation, which gives the
speed as a ratio.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from peagle.core import Generation
from peagle.data.bench import Task
from peagle.data.long_prompts import long_prompts, prompt_length, prompt_messages
from peagle.data.records import ignore
from peagle.errors import UserError
from peagle.evaluate.demo import decoding_speed
from peagle.evaluate.evaluate import Advance, EvaluateSettings, SetResult, summarize

if TYPE_CHECKING:
    from peagle.loaded import LoadedPair

DEFAULT_PROMPTS = 8  # per set and length


@dataclass(frozen=True, slots=True)
class ContextPoint:
    """One set at one context length."""

    context: int
    prompt_tokens: float  # mean
    result: SetResult
    tokens_per_second: float | None = None  # of decoding; None: not measured
    ratio_to_none: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "context": self.context,
            "prompt_tokens": round(self.prompt_tokens, 1),
            "tokens_per_second": rounded(self.tokens_per_second),
            "ratio_to_none": rounded(self.ratio_to_none),
        } | self.result.as_dict()


@dataclass(frozen=True, slots=True)
class ContextCurve:
    pair: str
    target: str
    dtype: str
    trained: bool
    window: int | None  # sliding window of the drafter
    settings: EvaluateSettings
    points: tuple[ContextPoint, ...]
    as_vllm: bool = False  # the drafter without what vLLM does not support

    @property
    def conditions(self) -> str:
        """What the drafts and the speed depend on: method, shape, window and options."""
        settings = self.settings
        words = [
            settings.method,
            f"K={settings.ks[0]}",
            f"trees of {settings.tree} nodes" if settings.tree else "chains",
            f"window {self.window:,}" if self.window else "no window",
            *(["drafter as in vLLM"] if self.as_vllm else []),
            *(["int8"] if settings.int8 else []),
        ]
        if settings.exact is not None:
            words.append("exact mode" if settings.exact else "exact mode off")
        return ", ".join(words)

    @property
    def by_set(self) -> dict[str, list[ContextPoint]]:
        sets: dict[str, list[ContextPoint]] = {}
        for point in self.points:
            sets.setdefault(point.result.set, []).append(point)
        return sets

    def as_dict(self) -> dict[str, Any]:
        settings = asdict(self.settings)
        [k], [temperature] = settings.pop("ks"), settings.pop("temperatures")
        return {
            "pair": self.pair,
            "target": self.target,
            "dtype": self.dtype,
            "trained": self.trained,
            "sliding_window": self.window,
            "k": k,
            "temperature": temperature,
            **settings,
            **({"as_vllm": True} if self.as_vllm else {}),
            "contexts": [point.as_dict() for point in self.points],
        }


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def build_prompts(
    loaded: "LoadedPair",
    sets: Mapping[str, Sequence[Task]],
    lengths: Sequence[int],
    count: int,
    settings: EvaluateSettings,
) -> dict[tuple[str, int], list[Task]]:
    """The long prompts of every set and context length; an error before anything is decoded."""
    if len(settings.ks) > 1 or len(settings.temperatures) > 1:
        raise UserError("`context` needs one `k` and one `temperature`: leave out the others")
    if count < 1:
        raise UserError(f"`limit` is {count}: use 1 or more prompts for each length")
    context = loaded.target.context
    max_tokens = settings.max_tokens
    if too_long := [length for length in lengths if length > context]:
        raise UserError(f"`context` {too_long[0]} exceeds the target's context of {context} tokens")
    if too_short := [length for length in lengths if length <= max_tokens]:
        raise UserError(
            f"`context` {too_short[0]} has no room for a prompt and an answer of {max_tokens}"
            " tokens: lower `max_tokens`"
        )
    sizes = [length - max_tokens for length in lengths]
    return {
        (name, size + max_tokens): prompts
        for name, tasks in sets.items()
        for size, prompts in long_prompts(loaded.target, tasks, sizes, count).items()
    }


def measure_contexts(
    loaded: "LoadedPair",
    prompts: Mapping[tuple[str, int], list[Task]],
    settings: EvaluateSettings,
    jump: bool = False,
    advance: Advance = ignore,
) -> ContextCurve:
    """A point for each set and length; `advance` is called once for every prompt."""
    has_drafter = settings.method != "ngram"
    config = loaded.drafter(settings.method).config if has_drafter else None
    measure = replay_point if jump else decode_point
    return ContextCurve(
        pair=loaded.pair.name,
        target=loaded.target.name or "",
        dtype=str(loaded.target.dtype).removeprefix("torch."),
        trained=config is None or config.trained,
        window=None if config is None else config.sliding_window,
        settings=settings,
        points=tuple(
            measure(loaded, name, length, tasks, settings, advance)
            for (name, length), tasks in prompts.items()
        ),
    )


def decode_point(
    loaded: "LoadedPair",
    name: str,
    length: int,
    tasks: Sequence[Task],
    settings: EvaluateSettings,
    advance: Advance = ignore,
) -> ContextPoint:
    """Answer every prompt with drafts and without them."""
    drafted: list[Generation] = []
    plain: list[Generation] = []
    for number, task in enumerate(tasks):
        ids = loaded.encode(prompt_messages(task))
        for method, answers in ((settings.method, drafted), ("none", plain)):
            answers.append(
                loaded.generate(
                    ids,
                    settings.ks[0],
                    method,
                    settings.max_tokens,
                    exact=settings.exact,
                    int8=settings.int8,
                    tree=0 if method == "none" else settings.tree,
                    temperature=settings.temperatures[0],
                    seed=settings.seed + number,
                )
            )
        advance(f"{name} {length}")
    result = summarize((step for answer in drafted for step in answer.steps), settings.ks[0])
    speed = decoding_speed(drafted)
    plain_speed = decoding_speed(plain)  # 0: every answer ended with its first token
    return ContextPoint(
        context=length,
        prompt_tokens=sum(answer.prompt_tokens for answer in drafted) / len(drafted),
        result=replace(
            result,
            set=name,
            temperature=settings.temperatures[0],
            tasks=len(tasks),
            exact=all(answer.exact for answer in drafted),
            seconds=sum(answer.seconds for answer in drafted),
        ),
        tokens_per_second=speed,
        ratio_to_none=speed / plain_speed if plain_speed else None,
    )


def replay_point(
    loaded: "LoadedPair",
    name: str,
    length: int,
    tasks: list[Task],
    settings: EvaluateSettings,
    advance: Advance = ignore,
) -> ContextPoint:
    """Answer in batches, then follow the matches (offline_acceptance.py)."""
    from peagle.evaluate.offline_acceptance import offline_acceptance

    [result] = offline_acceptance(loaded, {name: tasks}, settings).results
    for _ in tasks:
        advance(f"{name} {length}")
    lengths = [prompt_length(loaded.target, task) for task in tasks]
    return ContextPoint(length, sum(lengths) / len(lengths), result)
