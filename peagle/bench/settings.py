"""BenchSettings: which cells a run measures, and under which load."""

from dataclasses import dataclass, fields
from typing import Any

from peagle.draft_shape import check_tree_nodes
from peagle.errors import UserError
from peagle.results.key import CHAINS_ONLY, CellKey, cell_keys

MAX_CONCURRENCY = 4096
MAX_CLIENTS = 256
NAMED_IF_CHANGED = ("tree", "clients", "ngram")  # newer settings


@dataclass(frozen=True, slots=True)
class BenchSettings:
    sets: tuple[str, ...]
    methods: tuple[str, ...]
    k: tuple[int | str, ...]
    concurrency: tuple[int, ...]
    max_tokens: int = 512
    repeats: int = 3
    limit: int | None = None  # tasks of each set
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    exact: bool | None = None  # None: the engine decides
    profile: str | None = None
    warmup: int = 16  # tokens of each user's warm-up answer
    tree: tuple[int, ...] = CHAINS_ONLY  # nodes
    clients: int = 1  # processes that load an endpoint
    ngram: bool | None = None  # n-gram drafts beside a drafter's; None: the engine decides

    def __post_init__(self) -> None:
        self._check("max_tokens", self.max_tokens >= 1, "must be 1 or more")
        self._check("repeats", self.repeats >= 1, "must be 1 or more")
        self._check("warmup", self.warmup >= 0, "must be 0 or more")
        self._check("temperature", 0 <= self.temperature <= 100, "must be in 0..100")
        self._check(
            "concurrency",
            bool(self.concurrency) and all(1 <= c <= MAX_CONCURRENCY for c in self.concurrency),
            f"must be numbers in 1..{MAX_CONCURRENCY}, like 1,8,64",
        )
        self._check("clients", 1 <= self.clients <= MAX_CLIENTS, f"must be in 1..{MAX_CLIENTS}")
        for tree in self.tree:
            check_tree_nodes(tree, self.k)
        if any(self.tree) and self.methods and "p-eagle" not in self.methods:
            raise UserError(
                f"`tree` needs a p-eagle drafter: add p-eagle to `methods` {','.join(self.methods)}"
            )

    def _check(self, name: str, valid: bool, rule: str) -> None:
        if not valid:
            raise UserError(f"`{name}` {rule}; got {getattr(self, name)!r}")

    @property
    def keys(self) -> list[CellKey]:
        return cell_keys(self.sets, self.methods, self.k, self.concurrency, self.tree)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def to_json(self) -> dict[str, Any]:
        """Newer settings are left out at their default, so that older files resume."""
        values = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in NAMED_IF_CHANGED or getattr(self, f.name) != f.default
        }
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }
