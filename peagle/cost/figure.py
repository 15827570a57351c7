"""The chart: cost per million tokens against the speed that one user sees, each method's Pareto front."""

from peagle.cost.offers import Offer, front
from peagle.report.figures import Figure, Line, Point, apart, front_text, shade
from peagle.report.words import by_method, method_label


def figure(found: list[Offer]) -> Figure:
    lines = []
    methods = sorted({one.cell.method for one in found}, key=by_method)
    for method in methods:
        kept = front(one for one in found if one.cell.method == method)
        named = method in (methods[0], methods[-1])  # what lies between them has no room for words
        texts = [front_text(one.cell) if named else "" for one in kept]
        points = [
            Point(one.per_user or 0.0, one.per_million, text=t)
            for one, t in zip(kept, texts, strict=True)
        ]
        lines += [Line(method_label(method), shade(method), tuple(apart(points)))] if points else []
    return Figure(
        "cost",
        "Cost against speed for one user",
        "tokens/s of one user",
        "cost per million tokens",
        tuple(lines),
        log=True,
        note="Of each method, the cells that no other of its cells beats in both. c: requests at a time.",
    )
