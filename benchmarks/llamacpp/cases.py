"""What is measured: the cases of both engines, and the speeds of a case."""

from dataclasses import dataclass
from statistics import median
from typing import Literal

from peagle.core import Method

PREFILL_TOKENS = 512
PARALLEL = 4


@dataclass(frozen=True, slots=True)
class Case:
    engine: Literal["peagle", "llama.cpp"]
    kind: Literal["decode", "prefill"]
    requests: int = 1
    method: Method = "none"
    int8: bool = False
    bar: float | None = None  # the least ratio to llama.cpp that we want

    @property
    def workload(self) -> str:
        """What llama.cpp and peagle are compared in."""
        if self.kind == "prefill":
            return f"prefill of {PREFILL_TOKENS} tokens"
        return f"decode, {self.requests} request{'s' if self.requests > 1 else ''}"

    @property
    def name(self) -> str:
        if self.engine == "llama.cpp":
            return f"{self.workload}: llama.cpp"
        activations = "int8" if self.int8 else "float"
        return f"{self.workload}: {self.method}, {activations} activations"


LLAMA_CASES = (
    Case("llama.cpp", "decode"),
    Case("llama.cpp", "decode", PARALLEL),
    Case("llama.cpp", "prefill"),
)
PEAGLE_CASES = (
    Case("peagle", "decode", bar=0.7),
    Case("peagle", "decode", int8=True, bar=0.95),
    Case("peagle", "decode", method="p-eagle", bar=1.5),
    Case("peagle", "decode", method="p-eagle", int8=True, bar=1.8),
    Case("peagle", "decode", PARALLEL),
    Case("peagle", "decode", PARALLEL, int8=True),
    Case("peagle", "decode", PARALLEL, method="p-eagle", bar=1.2),
    Case("peagle", "decode", PARALLEL, method="p-eagle", int8=True, bar=1.2),
    Case("peagle", "prefill", bar=1.0),
    Case("peagle", "prefill", int8=True, bar=1.0),
)
# llama.cpp's turn comes between ours of the same workload, so that noise affects both.
CASES = tuple(
    sorted((*PEAGLE_CASES, *LLAMA_CASES), key=lambda case: (case.kind, case.requests, case.int8))
)


def baseline_of(case: Case) -> Case:
    return next(other for other in LLAMA_CASES if other.workload == case.workload)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second of a case, one value per round."""

    values: list[float]

    @property
    def best(self) -> float:
        return max(self.values)

    @property
    def median(self) -> float:
        return median(self.values)
