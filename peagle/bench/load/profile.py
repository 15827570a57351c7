"""A workload by the lengths of its answers: log-normal, as those of reasoning models are.

    ln(length) ~ N(mu, sigma)      median = exp(mu)      P90 = exp(mu + 1.2816 sigma)

Answers are forced to these lengths, so prompts only have to be of a given size: they are made up, the same every time.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from peagle.data.bench import Task
from peagle.errors import UserError, did_you_mean

Z90 = 1.2815515655446004  # 90 % of a standard normal lie below
KNOWN = {"reasoning": "median=3900,p90=10800,prompt=512,count=64"}
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
THINGS = (
    "crates of apples",
    "books",
    "tickets",
    "letters",
    "bags of flour",
    "bolts",
    "parcels",
    "bricks",
)
ASK = "\nThink it through step by step, check each step, and say how many there are of each in the end.\n"


@dataclass(frozen=True, slots=True)
class Profile:
    name: str
    median: int
    p90: int
    prompt: int = 512  # tokens, about
    count: int = 64  # requests

    def __post_init__(self) -> None:
        if min(self.median, self.prompt, self.count) < 1 or self.p90 <= self.median:
            raise UserError(
                f"the profile has median {self.median}, p90 {self.p90}, prompt {self.prompt}, count {self.count}:"
                " all must be 1 or more, and p90 above the median"
            )

    def lengths(self, seed: int) -> list[int]:
        mu, sigma = math.log(self.median), math.log(self.p90 / self.median) / Z90
        chance = random.Random(f"lengths {seed}")
        return [max(1, round(chance.lognormvariate(mu, sigma))) for _ in range(self.count)]

    def tasks(self, seed: int, tokens: Callable[[str], int] | None = None) -> list[Task]:
        """`tokens`: how many a text has; without it, a word counts as 1.3."""
        chance = random.Random(f"prompts {seed}")
        return [Task(str(i), (self._prompt(chance, tokens),), self.name) for i in range(self.count)]

    def _prompt(self, chance: random.Random, tokens: Callable[[str], int] | None) -> str:
        size = tokens or (lambda text: round(1.3 * len(text.split())))
        left, text = self.prompt - size(ASK), ""
        while True:
            more = f"{chance.choice(SUBJECTS)} {chance.choice(VERBS)} {chance.randint(2, 99)} {chance.choice(THINGS)}. "
            if size(text + more) > left and text:
                return text.strip() + ASK
            text += more[0].upper() + more[1:]


def parse_profile(word: str) -> Profile:
    """A known name, or median=3900,p90=10800 with prompt= and count= where wanted."""
    form = (
        "write it like --profile median=3900,p90=10800,prompt=512,count=64, or --profile reasoning"
    )
    if "=" not in word and word not in KNOWN:
        raise UserError(f"unknown profile {word!r}: {form}.{did_you_mean(word, list(KNOWN))}")
    try:
        values = {
            name.strip(): int(value)
            for name, value in (part.split("=") for part in expand(word).split(","))
        }
        return Profile(word if word in KNOWN else f"m{values['median']}-p{values['p90']}", **values)
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot read the profile {word!r}: {form}") from error


def expand(word: str) -> str:
    return KNOWN.get(word, word)


def fit(lengths: list[int], room: int, warn: Callable[[str], None]) -> list[int]:
    """No longer than the context has room for."""
    if room < 1:
        raise UserError(
            "the prompts of the profile fill the context: use a smaller prompt= in --profile"
        )
    cut = sum(length > room for length in lengths)
    if cut:
        warn(
            f"{cut} of {len(lengths)} answers of the profile are cut to {room:,} tokens: the context holds no more"
        )
    return [min(length, room) for length in lengths]
