"""What a run measures: every cell of it, and with which load."""

from dataclasses import dataclass
from typing import Any

from peagle.bench.order import CHAINS, keys_of
from peagle.core import check_k
from peagle.draft_shape import check_tree_nodes
from peagle.errors import UserError
from peagle.results.cell import CellKey

MAX_CELLS = 4096  # requests at a time


@dataclass(frozen=True, slots=True)
class BenchSettings:
    sets: tuple[str, ...]
    methods: tuple[str, ...]
    k: tuple[int | str, ...]
    concurrency: tuple[int, ...]
    max_tokens: int = 512
    repeats: int = 3
    limit: int | None = None
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    exact: bool = False
    profile: str | None = None
    warmup: int = 16  # tokens of the answers that warm a cell up, one a user
    tree: tuple[int, ...] = CHAINS  # nodes

    def __post_init__(self) -> None:
        rules = {
            "--max-tokens must be 1 or more": self.max_tokens >= 1,
            "--repeats must be 1 or more": self.repeats >= 1,
            "--warmup must be 0 or more": self.warmup >= 0,
            "--temperature must be in 0..100": 0 <= self.temperature <= 100,
            f"--concurrency must be numbers in 1..{MAX_CELLS}, like 1,8,64": bool(self.concurrency)
            and all(1 <= c <= MAX_CELLS for c in self.concurrency),
        }
        for rule, holds in rules.items():
            if not holds:
                name = rule.split()[0].removeprefix("--").replace("-", "_")
                raise UserError(f"{rule}; got {getattr(self, name)!r}")
        for tree in self.tree:
            check_tree_nodes(tree, self.k, exact=self.exact)
        if any(self.tree) and self.methods and "p-eagle" not in self.methods:
            raise UserError(
                f"--tree needs a p-eagle drafter: add p-eagle to --methods {','.join(self.methods)}"
            )

    @property
    def keys(self) -> list[CellKey]:
        return keys_of(self.sets, self.methods, self.k, self.concurrency, self.tree)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def as_dict(self) -> dict[str, Any]:
        """Chains only: as it was written before there were trees, so that such a run goes on."""
        names = [name for name in self.__slots__ if name != "tree" or self.tree != CHAINS]
        told = {name: getattr(self, name) for name in names}
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in told.items()
        }


def parse_ks(text: str) -> tuple[int | str, ...]:
    """3,5,7,11 or auto, or both; each once."""
    found: list[int | str] = []
    for word in (part.strip() for part in text.split(",")):
        if word != "auto" and not word.isdecimal():
            raise UserError(f"{text!r} is no list of K: write it like -k 3,5,7,11, or -k auto")
        found.append(word if word == "auto" else check_k(int(word)))
    return tuple(dict.fromkeys(found))


def parse_counts(text: str, option: str = "--concurrency") -> tuple[int, ...]:
    words = [part.strip() for part in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise UserError(
            f"{text!r} is no list of numbers of 1 or more: write it like {option} 1,8,64"
        )
    return tuple(dict.fromkeys(int(word) for word in words))


def parse_trees(text: str) -> tuple[int, ...]:
    """0,16,32: 0 is a chain; each once."""
    words = [part.strip() for part in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise UserError(f"{text!r} is no list of nodes: write it like --tree 32, or --tree 0,16,32")
    return tuple(dict.fromkeys(int(word) for word in words))
