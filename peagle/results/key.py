"""CellKey: which set, method, draft form and concurrency a cell measures."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

CHAINS_ONLY = (0,)  # tree sizes of a run without trees


@dataclass(frozen=True, slots=True)
class CellKey:
    set: str
    method: str
    k: int | str  # 0 without drafts, "auto" with adaptive drafting
    concurrency: int
    tree: int = 0  # nodes of the draft trees, the maximum with adaptive drafting; 0 for chains

    def __str__(self) -> str:
        return f"{self.set} {draft_label(self.method, self.k, self.tree)} c={self.concurrency}"

    @property
    def variant(self) -> str:
        return variant_name(self.method, self.tree)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "CellKey | None":
        """None where the object does not say what it measured. Old files do not name the tree."""
        names = raw.get("set"), raw.get("method")
        if not all(isinstance(name, str) and name for name in names):
            return None
        k = 0 if names[1] == "none" else raw.get("k")
        if not (k == "auto" or is_count(k, 0)):
            return None
        concurrency = raw.get("concurrency")
        tree = raw.get("tree", 0)
        if not is_count(concurrency, 1) or not is_count(tree, 0):
            return None
        return cls(str(names[0]), str(names[1]), k, concurrency, tree)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def is_count(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def variant_name(method: str, tree: int) -> str:
    """A method with its tree size: p-eagle for chains, p-eagle tree 32 for trees of 32 nodes."""
    return f"{method} tree {tree}" if tree else method


def draft_label(method: str, k: int | str, tree: int = 0) -> str:
    """A method with its draft form, such as none, p-eagle K=7, or p-eagle tree 32, K=7."""
    if not k and not tree:
        return method
    return f"{variant_name(method, tree)}{',' if tree else ''} K={k}"


def cell_keys(
    sets: Sequence[str],
    methods: Sequence[str],
    ks: Sequence[int | str],
    concurrency: Sequence[int],
    trees: Sequence[int] = CHAINS_ONLY,
) -> list[CellKey]:
    """Every cell of a run. `none` has no K, and only P-EAGLE drafts trees."""
    forms: list[tuple[str, int | str, int]] = []
    for method in methods:
        if method == "none":
            forms.append((method, 0, 0))
            continue
        sizes = trees if method == "p-eagle" else CHAINS_ONLY
        forms += [(method, k, tree) for tree in sizes for k in ks]
    return [
        CellKey(name, method, k, c, tree)
        for name in sets
        for c in concurrency
        for method, k, tree in forms
    ]
