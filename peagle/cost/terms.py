"""Terms: what an hour costs, how well it is used, and what is asked of it."""

from dataclasses import dataclass
from math import ceil

from peagle.errors import UserError

EXAMPLES = {
    "price": "4.5",
    "gpus": "1",
    "busy": "0.6",
    "tpot_ms": "20",
    "load": "50000",
    "users": "500",
}


@dataclass(frozen=True)
class Terms:
    price: float  # of an hour of one GPU, in any currency
    gpus: int = 1  # of the replica that was measured
    busy: float = 1.0  # the share of an hour in which it is loaded as it was measured
    tpot_ms: float | None = None  # no token may take longer, on average
    load: float | None = None  # tokens a second to be served
    users: int | None = None  # requests at a time to be served

    def __post_init__(self) -> None:
        for name, example in EXAMPLES.items():
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                option = "--" + name.replace("_", "-")
                raise UserError(
                    f"{option} is {value:g}: give a number above 0, like {option} {example}"
                )
        if self.busy > 1:
            raise UserError(f"--busy is {self.busy:g}: it is a share of the hour, at most 1")

    def per_million(self, tokens_per_second: float) -> float:
        return price_of(tokens_per_second * self.busy, self.price * self.gpus)

    def replicas(self, tokens_per_second: float, concurrency: int) -> int | None:
        """So many serve the load and the users; None where neither was given."""
        asked = [self.load / (tokens_per_second * self.busy)] if self.load is not None else []
        asked += [self.users / concurrency] if self.users is not None else []
        return max(1, *(ceil(count - 1e-9) for count in asked)) if asked else None


def price_of(tokens_per_second: float, per_hour: float) -> float:
    """Of a million tokens."""
    return per_hour / (3600 * tokens_per_second) * 1e6 if tokens_per_second > 0 else float("inf")
