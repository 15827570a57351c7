"""Numbers and names as text; what is not known is a dash."""

from collections.abc import Sequence

from peagle.results.runs import ResultCell

DASH = "–"
METHODS = {"none": "none", "eagle3": "EAGLE-3", "p-eagle": "P-EAGLE"}
ORDER = tuple(METHODS)
TREE = " tree "  # between a method and the nodes of its trees


def method_label(method: str) -> str:
    """A method's own name; of trees too, such as P-EAGLE tree 32."""
    name, of, nodes = method.partition(TREE)
    return METHODS.get(name, name) + of + nodes


def form_label(method: str, k: int | str) -> str:
    """Such as none, P-EAGLE K=7, or P-EAGLE tree 32, K=7."""
    if k == 0:
        return method_label(method)
    return f"{method_label(method)}{',' if TREE in method else ''} K={k}"


def label(cell: ResultCell) -> str:
    return form_label(cell.method, cell.k)


def by_method(method: str) -> tuple[int, int, str]:
    """A sort key: none, EAGLE-3, P-EAGLE with chains, then trees by size; then whatever else there is."""
    name, _, nodes = method.partition(TREE)
    return (
        ORDER.index(name) if name in ORDER else len(ORDER),
        int(nodes) if nodes.isdecimal() else 0,
        method,
    )


def by_k(k: int | str) -> tuple[bool, int]:
    return isinstance(k, str), k if isinstance(k, int) else 0


def amount(value: float | None, digits: int | None = None) -> str:
    """Three digits that matter: 12,345, 123, 12.3, 1.23."""
    if value is None:
        return DASH
    if digits is None:
        digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f}"


def times(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}×"


def share(value: float | None) -> str:
    return DASH if value is None else f"{value:.1%}"


def percent(value: float | None) -> str:
    """Of a number that is a percentage already: vLLM writes acceptance rates so."""
    return DASH if value is None else f"{value:.1f}%"


def gigabytes(value: float | None) -> str:
    return DASH if value is None else f"{value / 2**30:.1f} GiB"


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
