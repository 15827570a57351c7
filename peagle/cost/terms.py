"""Terms: what an hour costs, how busy the hardware is, and the load it must serve."""

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
    busy: float = 1.0  # the share of an hour in which it has the measured load
    tpot_ms: float | None = None  # the maximum of the mean time per output token
    load: float | None = None  # tokens per second to serve
    users: int | None = None  # concurrent requests to serve

    def __post_init__(self) -> None:
        for name, example in EXAMPLES.items():
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UserError(
                    f"`{name}` is {value:g}: give a number above 0, like `{name}` {example}"
                )
        if self.busy > 1:
            raise UserError(f"`busy` is {self.busy:g}: it is a share of the hour, at most 1")

    def cost_per_million(self, tokens_per_second: float) -> float:
        return cost_per_million(tokens_per_second * self.busy, self.price * self.gpus)

    def replicas(self, tokens_per_second: float, concurrency: int) -> int | None:
        """How many replicas serve the load and the users; None where neither is given."""
        needed = []
        if self.load is not None:
            needed.append(self.load / (tokens_per_second * self.busy))
        if self.users is not None:
            needed.append(self.users / concurrency)
        return max(1, *(ceil(count - 1e-9) for count in needed)) if needed else None


def cost_per_million(tokens_per_second: float, price_per_hour: float) -> float:
    """The cost of a million tokens."""
    if tokens_per_second <= 0:
        return float("inf")
    return price_per_hour / (3600 * tokens_per_second) * 1e6
