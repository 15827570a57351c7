"""The nouns everybody passes around: Pair, Sampling, Step, Generation.

A *pair* is a target, its drafters (one per method), the method and K to use unless told otherwise.
"""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from peagle.errors import UserError, nearest

Method = Literal["none", "eagle3", "p-eagle"]
METHODS: tuple[Method, ...] = get_args(Method)
Format = Literal["peagle", "vllm", "speculators"]  # of a drafter's checkpoint
FORMATS: tuple[Format, ...] = get_args(Format)


def parse_method(word: str) -> Method:
    for method in METHODS:
        if word == method:
            return method
    raise UserError(
        f"unknown method {word!r}: use one of {', '.join(METHODS)}.{nearest(word, list(METHODS))}"
    )


def check_k(k: int) -> int:
    if k < 1:
        raise UserError(
            f"K is {k}, but at least one token must be drafted: use -k 1 or more, or --method none"
        )
    return k


class Bias(Mapping[int, float]):
    """Token id -> what is added to its logit. It cannot change, so that a Sampling can be compared, hashed and sent."""

    __slots__ = ("_of",)

    def __init__(self, of: Mapping[int, float] | None = None) -> None:
        self._of = dict(of or {})

    def __getitem__(self, token: int) -> float:
        return self._of[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def __hash__(self) -> int:
        return hash(frozenset(self._of.items()))

    def __repr__(self) -> str:
        return repr(self._of)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target's distribution is processed before a token is taken from it. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0  # divides the logits of what the prompt or the answer said
    presence_penalty: float = 0.0  # taken from the logits of what the answer said
    frequency_penalty: float = 0.0  # taken as often as the answer said it
    logit_bias: Mapping[int, float] = Bias()

    def __post_init__(self) -> None:
        object.__setattr__(self, "logit_bias", Bias(self.logit_bias))
        bias = self.logit_bias
        rules = {
            "temperature must be 0 (greedy) or more": 0 <= self.temperature < float("inf"),
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "top_k must be 0 (no limit) or more": self.top_k >= 0,
            "min_p must be in [0, 1]": 0 <= self.min_p <= 1,
            "seed must be 0 or more": self.seed is None or self.seed >= 0,
            "repetition_penalty must be above 0 (1: none)": 0
            < self.repetition_penalty
            < float("inf"),
            "presence_penalty must be in [-2, 2]": -2 <= self.presence_penalty <= 2,
            "frequency_penalty must be in [-2, 2]": -2 <= self.frequency_penalty <= 2,
            "logit_bias must be in [-100, 100]": all(
                -100 <= value <= 100 for value in bias.values()
            ),
            "logit_bias must name token ids, 0 or more": all(token >= 0 for token in bias),
        }
        for rule, holds in rules.items():
            if not holds:
                raise UserError(f"{rule}; got {getattr(self, rule.split()[0])}")

    @property
    def greedy(self) -> bool:
        return (
            self.temperature < 1e-5
        )  # below that, dividing by it overflows: the likeliest token takes all

    def seeded(self) -> "Sampling":
        """The same, with a seed of its own where it samples and has none."""
        return (
            self
            if self.greedy or self.seed is not None
            else replace(self, seed=secrets.randbelow(2**31))
        )

    @property
    def penalized(self) -> bool:
        """Does what was said before change what is said next?"""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def plain(self) -> bool:
        """The argmax of the raw logits, and nothing else."""
        return self.greedy and not self.penalized and not self.logit_bias


@dataclass(frozen=True, slots=True)
class Step:
    """One target pass: `accepted` of `drafted` tokens kept, then one token of the target's own.

    `tokens` is what the request receives: accepted drafts + bonus, cut at a stop token or at max_tokens.
    The counts are those of the whole pass, as vLLM counts them.
    """

    tokens: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to one prompt, and how it came about."""

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
    weights: str = ""  # what the target's matrices are multiplied as: the dtype, or a quantized target's format
    exact: bool = False
    trained: bool = True
    tree: int = 0  # nodes, where drafts were trees

    @property
    def form(self) -> str:
        """Such as K=7, or tree 32, K=7."""
        return f"tree {self.tree}, K={self.k}" if self.tree else f"K={self.k}"

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / drafts, the bonus token counted: at most K + 1; 1.0 where nothing was drafted."""
        drafts = sum(step.drafted > 0 for step in self.steps)
        return 1 + sum(step.accepted for step in self.steps) / drafts if drafts else 1.0

    @property
    def accepted_per_position(self) -> list[float]:
        """Position i (from 0): the share of passes that drafted i + 1 tokens or more and accepted them."""
        shares = []
        for i in range(max((step.drafted for step in self.steps), default=0)):
            tried = [step.accepted > i for step in self.steps if step.drafted > i]
            shares.append(sum(tried) / len(tried))
        return shares

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: the first token belongs to the prefill and is not counted."""
        spent = self.seconds - self.prefill_seconds
        return (len(self.token_ids) - 1) / spent if spent > 0 else 0.0

    @property
    def from_draft(self) -> list[bool]:
        """For each token: was it an accepted draft (True) or the target's own (False)?"""
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
            "steps": len(self.steps),
            "acceptance_length": round(self.acceptance_length, 4),
            "accepted_per_position": [round(share, 4) for share in self.accepted_per_position],
            "num_drafts": sum(step.drafted > 0 for step in self.steps),
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
