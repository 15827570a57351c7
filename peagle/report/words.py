"""Numbers and names as text. An unknown value is a dash."""

from collections.abc import Sequence

from peagle.results.cell import BenchCell

DASH = "–"
METHOD_LABELS = {"none": "none", "ngram": "n-gram", "eagle3": "EAGLE-3", "p-eagle": "P-EAGLE"}
METHOD_ORDER = tuple(METHOD_LABELS)
TREE = " tree "  # between a method and the nodes of its trees


def method_label(method: str) -> str:
    """The display name of a method, such as P-EAGLE or P-EAGLE tree 32."""
    name, separator, nodes = method.partition(TREE)
    return METHOD_LABELS.get(name, name) + separator + nodes


def draft_label(method: str, k: int | str) -> str:
    """A method with its K, such as none, P-EAGLE K=7, or P-EAGLE tree 32, K=7."""
    if k == 0:
        return method_label(method)
    return f"{method_label(method)}{',' if TREE in method else ''} K={k}"


def cell_label(cell: BenchCell) -> str:
    return draft_label(cell.variant, cell.k)


def method_order(method: str) -> tuple[int, int, str]:
    """A sort key: none, EAGLE-3, P-EAGLE with chains, with trees by size, other methods."""
    name, _, nodes = method.partition(TREE)
    return (
        METHOD_ORDER.index(name) if name in METHOD_ORDER else len(METHOD_ORDER),
        int(nodes) if nodes.isdecimal() else 0,
        method,
    )


def k_order(k: int | str) -> tuple[bool, int]:
    """A sort key: numbers, then auto."""
    return isinstance(k, str), k if isinstance(k, int) else 0


def amount(value: float | None, digits: int | None = None) -> str:
    """Three significant digits: 12,345, 123, 12.3, 1.23. `digits`: decimals."""
    if value is None:
        return DASH
    if digits is None:
        digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f}"


def times(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}×"


def share(value: float | None) -> str:
    """A share of 1 as a percentage."""
    return DASH if value is None else f"{value:.1%}"


def percent(value: float | None) -> str:
    """A number that is a percentage already, such as vLLM's acceptance rate."""
    return DASH if value is None else f"{value:.1f}%"


def gigabytes(value: float | None) -> str:
    return DASH if value is None else f"{value / 2**30:.1f} GiB"


def join_words(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
