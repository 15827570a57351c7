"""The chart of cost per million tokens against the speed that one user sees."""

from collections.abc import Sequence

from peagle.cost.offers import Offer, pareto_front
from peagle.report.figure import Figure, Line, Point, hide_close_texts
from peagle.report.figures import front_text, method_color
from peagle.report.words import method_label, method_order


def cost_figure(offers: Sequence[Offer]) -> Figure:
    """A line for each method: its Pareto front."""
    lines = []
    methods = sorted({offer.cell.variant for offer in offers}, key=method_order)
    for method in methods:
        front = pareto_front(offer for offer in offers if offer.cell.variant == method)
        has_texts = method in (methods[0], methods[-1])  # between them there is no room for texts
        points = [
            Point(
                offer.per_user or 0.0,
                offer.per_million,
                text=front_text(offer.cell) if has_texts else "",
            )
            for offer in front
        ]
        if points:
            label = method_label(method)
            lines.append(Line(label, method_color(method), tuple(hide_close_texts(points))))
    return Figure(
        "cost",
        "Cost against speed for one user",
        "tokens/s of one user",
        "cost per million tokens",
        tuple(lines),
        log=True,
        note="Of each method, the cells that no other of its cells beats in both."
        " c: requests at a time.",
    )
