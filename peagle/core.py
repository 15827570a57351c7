"""The types that all packages exchange: Method, Format, Sampling, Step, Generation."""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from peagle.errors import UserError, did_you_mean

Method = Literal["none", "ngram", "eagle3", "p-eagle"]
METHODS: tuple[Method, ...] = get_args(Method)
DRAFTER_METHODS: tuple[Method, ...] = ("eagle3", "p-eagle")  # those with a trained drafter
CheckpointFormat = Literal["peagle", "vllm", "speculators"]  # formats of a drafter checkpoint
CHECKPOINT_FORMATS: tuple[CheckpointFormat, ...] = get_args(CheckpointFormat)


def parse_method(text: str) -> Method:
    for method in METHODS:
        if text == method:
            return method
    close = did_you_mean(text, list(METHODS))
    raise UserError(f"unknown method {text!r}: use one of {', '.join(METHODS)}.{close}")


def check_k(k: int) -> int:
    """Return `k`, the number of tokens to draft, or raise if it is below 1."""
    if k < 1:
        raise UserError(
            f"`k` is {k}, but at least one token must be drafted: use 1 or more, or `method` none"
        )
    return k


class LogitBias(Mapping[int, float]):
    """Token id -> addend of its logit.

    Immutable: a Sampling can be compared, hashed and pickled.
    """

    __slots__ = ("_addends",)

    def __init__(self, addends: Mapping[int, float] | None = None) -> None:
        self._addends = dict(addends or {})

    def __getitem__(self, token: int) -> float:
        return self._addends[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._addends)

    def __len__(self) -> int:
        return len(self._addends)

    def __hash__(self) -> int:
        return hash(frozenset(self._addends.items()))

    def __repr__(self) -> str:
        return repr(self._addends)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target's distribution is processed before a token is sampled.

    The fields have the names and meanings of the OpenAI API and vLLM. Temperature 0 is greedy.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0  # divides the logits of tokens in the prompt or the answer
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the answer
    frequency_penalty: float = 0.0  # subtracted once per occurrence in the answer
    logit_bias: Mapping[int, float] = LogitBias()

    def __post_init__(self) -> None:
        object.__setattr__(self, "logit_bias", LogitBias(self.logit_bias))
        bias = self.logit_bias
        positive_penalty = 0 < self.repetition_penalty < float("inf")
        # Every rule starts with the name of its field.
        rules = {
            "temperature must be 0 (greedy) or more": 0 <= self.temperature < float("inf"),
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "top_k must be 0 (no limit) or more": self.top_k >= 0,
            "min_p must be in [0, 1]": 0 <= self.min_p <= 1,
            "seed must be 0 or more": self.seed is None or self.seed >= 0,
            "repetition_penalty must be above 0 (1: none)": positive_penalty,
            "presence_penalty must be in [-2, 2]": -2 <= self.presence_penalty <= 2,
            "frequency_penalty must be in [-2, 2]": -2 <= self.frequency_penalty <= 2,
            "logit_bias must be in [-100, 100]": all(-100 <= x <= 100 for x in bias.values()),
            "logit_bias must name token ids, 0 or more": all(token >= 0 for token in bias),
        }
        for rule, holds in rules.items():
            if not holds:
                raise UserError(f"{rule}; got {getattr(self, rule.split()[0])}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken.

        Dividing by a smaller temperature would overflow.
        """
        return self.temperature < 1e-5

    def seeded(self) -> "Sampling":
        """The same, with a random seed if it samples and has none."""
        if self.greedy or self.seed is not None:
            return self
        return replace(self, seed=secrets.randbelow(2**31))

    @property
    def penalized(self) -> bool:
        """Whether earlier tokens change the distribution of the next one."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def plain(self) -> bool:
        """Whether the next token is the argmax of the raw logits."""
        return self.greedy and not self.penalized and not self.logit_bias


@dataclass(frozen=True, slots=True)
class Step:
    """One target pass: `accepted` of `drafted` tokens, then the target's own (bonus) token.

    `tokens` are what the request receives: accepted drafts and the bonus token, cut at a stop token
    or at max_tokens. The counts are those of the whole pass, as vLLM counts them.
    """

    tokens: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to one prompt, with its steps, settings and times."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    steps: list[Step]
    finish_reason: Literal["stop", "length"]
    method: Method
    k: int
    seconds: float
    prefill_seconds: float
    seed: int | None = None
    dtype: str = ""
    weights: str = ""  # format of the target's matrices: the dtype, or fp8, int8, int4
    exact: bool = False
    trained: bool = True
    tree: int = 0  # nodes of the draft tree; 0: drafts were chains
    adaptive: bool = False  # K followed the measured costs and acceptance, up to `k`

    @property
    def shape_text(self) -> str:
        """The draft shape, like "K=7", "K=auto" or "tree 32, K=7"."""
        if self.adaptive:
            return "K=auto"
        return f"tree {self.tree}, K={self.k}" if self.tree else f"K={self.k}"

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / drafts, with the bonus token: at most K + 1; 1.0 without drafts."""
        drafts = self.steps_with_drafts
        return 1 + sum(step.accepted for step in self.steps) / drafts if drafts else 1.0

    @property
    def steps_with_drafts(self) -> int:
        """The number of steps that verified drafts; adaptive drafting has others, too."""
        return sum(step.drafted > 0 for step in self.steps)

    @property
    def accepted_per_position(self) -> list[float]:
        """For position i from 0: of the steps that drafted more than i tokens, the fraction that
        accepted more than i."""
        fractions = []
        for i in range(max((step.drafted for step in self.steps), default=0)):
            outcomes = [step.accepted > i for step in self.steps if step.drafted > i]
            fractions.append(sum(outcomes) / len(outcomes))
        return fractions

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed; the first token belongs to the prefill and does not count."""
        decode_seconds = self.seconds - self.prefill_seconds
        return (len(self.token_ids) - 1) / decode_seconds if decode_seconds > 0 else 0.0

    @property
    def from_draft(self) -> list[bool]:
        """For each token: True for an accepted draft, False for the target's own token."""
        return [i < step.accepted for step in self.steps for i in range(len(step.tokens))]

    def as_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": self.prompt_tokens,
            "finish_reason": self.finish_reason,
            "method": self.method,
            "k": self.k,
            "tree": self.tree,
            "adaptive": self.adaptive,
            "steps": len(self.steps),
            "acceptance_length": round(self.acceptance_length, 4),
            "accepted_per_position": [round(x, 4) for x in self.accepted_per_position],
            "num_drafts": self.steps_with_drafts,
            "num_draft_tokens": sum(step.drafted for step in self.steps),
            "num_accepted_tokens": sum(step.accepted for step in self.steps),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "seconds": round(self.seconds, 4),
            "prefill_seconds": round(self.prefill_seconds, 4),
            "seed": self.seed,
            "dtype": self.dtype,
            "weights": self.weights,
            "exact": self.exact,
            "trained": self.trained,
        }
