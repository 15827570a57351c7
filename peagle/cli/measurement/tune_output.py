"""What `peagle tune` prints: the plan of a dry run, and the summary."""

from typing import TYPE_CHECKING

from rich.markup import escape

from peagle.cli.application import out

if TYPE_CHECKING:
    from peagle.bench.tune import Tuner
    from peagle.catalog.pair import Best
    from peagle.loaded import LoadedPair


def print_plan(
    loaded: "LoadedPair", methods: list[str], counts: list[int], ks: list[int], prompts: int
) -> None:
    from peagle.bench.tune import MAX_KS_PER_LOAD, request_count
    from peagle.catalog.tuned import tuned_path

    measurements = len(counts) * (1 + len(methods) * min(MAX_KS_PER_LOAD, len(ks)))
    requests = ", ".join(str(request_count(count)) for count in counts)
    lines = [
        f"none, then {', '.join(methods) or 'nothing else'},"
        f" at concurrency {', '.join(map(str, counts))}; K from {', '.join(map(str, ks))},"
        f" no more than {MAX_KS_PER_LOAD} of them for a method at one load.",
        f"First K={max(ks)} at c={counts[0]}:"
        " its acceptance by position tells which other K can win.",
        f"At most {measurements} measurements (and the close ones again) of {requests} requests,"
        f" from {prompts} prompts; written to {tuned_path(loaded.pair)}.",
    ]
    for line in lines:
        out.print(escape(line), highlight=False, soft_wrap=True)


def print_summary(tuner: "Tuner", best: "dict[int, Best]", price: float | None) -> None:
    for line in summary_lines(tuner, best, price):
        out.print(escape(line), highlight=False, soft_wrap=True)


def summary_lines(tuner: "Tuner", best: "dict[int, Best]", price: float | None) -> list[str]:
    """Three lines: the best methods, why they are, and what they cost."""
    from peagle.bench.tune import tuned_choices
    from peagle.results.key import draft_label

    choices = tuned_choices(tuner, best, price)
    winners = "; ".join(
        f"c={choice.concurrency}: {draft_label(choice.method, choice.k)},"
        f" {choice.output_throughput:,.0f} tokens/s ({choice.speedup or 0.0:.2f}x none)"
        for choice in choices
    )
    rates = "; ".join(
        f"{method} {' '.join(f'{rate:.2f}' for rate in rates)}"
        for method, rates in tuner.position_rates.items()
    )
    growth = "; ".join(step_growth(tuner, concurrency) for concurrency in best)
    if price is None:
        cost = "Cost: give --price, the price of an hour, to see it per million tokens."
    else:
        costs = ", ".join(
            f"c={choice.concurrency} {choice.cost_per_million:,.3g}" for choice in choices
        )
        cost = f"Cost per million tokens at {price:g} an hour: {costs}."
    return [f"Best: {winners}.", f"Why: accepted by position: {rates}. {growth}.", cost]


def step_growth(tuner: "Tuner", concurrency: int) -> str:
    """How the time of a step grows with K, for the method with the most K measured."""
    points = tuner.points_at(concurrency)
    method = max(tuner.methods, key=lambda m: sum(name == m for name, _ in points), default=None)
    costs = {k: point.step_ms for (name, k), point in points.items() if name == method}
    if method is None or len(costs) < 2:
        return f"at c={concurrency} only none was measured"
    low = min(costs)
    high = max(costs)
    growth = costs[high] / costs[low] if costs[low] else 0.0
    return (
        f"at c={concurrency} a step of {method} takes {costs[low]:.1f} ms with K={low},"
        f" {growth:.2f}x that with K={high}"
    )
