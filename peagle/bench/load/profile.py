"""Profile: a workload by the lengths of its answers, log-normal like those of reasoning models.

    ln(length) ~ N(mu, sigma)      median = exp(mu)      P90 = exp(mu + 1.2816 sigma)

Answers are forced to these lengths, so the prompts only need a given size: they are made up, and
the same every time.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from peagle.data.bench import Task
from peagle.errors import UserError, did_you_mean

Z90 = 1.2815515655446004  # 90 % of a standard normal distribution lie below
TOKENS_PER_WORD = 1.3
NAMED_PROFILES = {"reasoning": "median=3900,p90=10800,prompt=512,count=64"}
SUBJECTS = (
    "a train",
    "a farmer",
    "the library",
    "a ship",
    "a baker",
    "the school",
    "a courier",
    "the factory",
)
VERBS = ("carries", "sells", "stores", "delivers", "loses", "receives", "counts", "divides")
OBJECTS = (
    "crates of apples",
    "books",
    "tickets",
    "letters",
    "bags of flour",
    "bolts",
    "parcels",
    "bricks",
)
INSTRUCTION = (
    "\nThink it through step by step, check each step,"
    " and say how many there are of each in the end.\n"
)


@dataclass(frozen=True, slots=True)
class Profile:
    name: str
    median: int
    p90: int
    prompt: int = 512  # approximate tokens of a prompt
    count: int = 64  # requests

    def __post_init__(self) -> None:
        if min(self.median, self.prompt, self.count) < 1 or self.p90 <= self.median:
            raise UserError(
                f"the profile has median {self.median}, p90 {self.p90}, prompt {self.prompt},"
                f" count {self.count}: all must be 1 or more, and p90 above the median"
            )

    def lengths(self, seed: int) -> list[int]:
        mu = math.log(self.median)
        sigma = math.log(self.p90 / self.median) / Z90
        rng = random.Random(f"lengths {seed}")
        return [max(1, round(rng.lognormvariate(mu, sigma))) for _ in range(self.count)]

    def tasks(self, seed: int, count_tokens: Callable[[str], int] | None = None) -> list[Task]:
        """Without `count_tokens`, a word counts as 1.3 tokens."""
        rng = random.Random(f"prompts {seed}")
        return [
            Task(str(i), (self._prompt(rng, count_tokens),), self.name) for i in range(self.count)
        ]

    def _prompt(self, rng: random.Random, count_tokens: Callable[[str], int] | None) -> str:
        count = count_tokens or (lambda text: round(TOKENS_PER_WORD * len(text.split())))
        max_tokens = self.prompt - count(INSTRUCTION)
        text = ""
        while True:
            sentence = f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.randint(2, 99)} "
            sentence += f"{rng.choice(OBJECTS)}. "
            if count(text + sentence) > max_tokens and text:
                return text.strip() + INSTRUCTION
            text += sentence[0].upper() + sentence[1:]


def parse_profile(text: str) -> Profile:
    """A named profile, or median=3900,p90=10800 with optional prompt= and count=."""
    example = (
        "write it like `profile` median=3900,p90=10800,prompt=512,count=64, or `profile` reasoning"
    )
    if "=" not in text and text not in NAMED_PROFILES:
        suggestion = did_you_mean(text, list(NAMED_PROFILES))
        raise UserError(f"unknown profile {text!r}: {example}.{suggestion}")
    definition = NAMED_PROFILES.get(text, text)
    try:
        pairs = (part.split("=") for part in definition.split(","))
        values = {name.strip(): int(value) for name, value in pairs}
        name = text if text in NAMED_PROFILES else f"m{values['median']}-p{values['p90']}"
        return Profile(name, **values)
    except UserError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"cannot read the profile {text!r}: {example}") from error


def fit_lengths(lengths: list[int], max_length: int, warn: Callable[[str], None]) -> list[int]:
    """The lengths, cut to what the context has room for."""
    if max_length < 1:
        raise UserError(
            "the prompts of the profile fill the context: use a smaller prompt= in `profile`"
        )
    cut = sum(length > max_length for length in lengths)
    if cut:
        warn(
            f"{cut} of {len(lengths)} answers of the profile are cut to {max_length:,} tokens:"
            " the context holds no more"
        )
    return [min(length, max_length) for length in lengths]
