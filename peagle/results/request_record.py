"""RequestRecord: one request of a load, as the client saw it."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """When a request was sent, when the chunks of its answer arrived (seconds), and the answer."""

    task: str
    turn: int
    start: float
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    ids: list[int] = field(default_factory=list)  # empty where a server reports no token ids
    text: str = ""
    error: str | None = None

    @property
    def seconds(self) -> float:
        return self.arrivals[-1] - self.start if self.arrivals else 0.0
