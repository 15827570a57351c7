"""The result in one sentence, for a decision. Where spreads overlap there is no winner."""

from collections.abc import Sequence
from itertools import groupby

from peagle.report.grid import Grid
from peagle.report.words import cell_label, join_words, method_label
from peagle.results.cell import BenchCell, overlap


def verdict(grid: Grid) -> str:
    """One sentence, such as:

    P-EAGLE K=7 is fastest with up to 16 at a time: 1.60 to 2.40 times plain decoding.
    """
    if not grid.measured:
        return "Nothing could be measured: every request failed."
    if not grid.drafting:
        return "Only plain decoding (none) was measured: there is nothing to compare."
    if "none" not in grid.methods:
        return (
            "Plain decoding (none) was not measured, so no speed-up is known."
            f" {fastest_sentence(grid)}"
        )
    comparable = [
        c
        for c in grid.concurrencies
        if grid.none(c) and any(grid.best(c, method) for method in grid.drafting)
    ]
    if not comparable:
        return (
            "Plain decoding (none) and the others were measured at different concurrencies:"
            " nothing can be compared."
        )
    return f"{winner_sentence(grid, comparable)}{single_run_note(grid, comparable)}"


def fastest_sentence(grid: Grid) -> str:
    fastest = [
        f"{cell_label(cell)} with {c} at a time"
        for c in grid.concurrencies
        if (cell := grid.best(c))
    ]
    return f"Fastest: {join_words(fastest)}."


def winner_sentence(grid: Grid, concurrencies: Sequence[int]) -> str:
    winners = {c: grid.winners(c) for c in concurrencies}
    if all(winners[c][0].variant == "none" for c in concurrencies):
        ties = [str(c) for c in concurrencies if len(winners[c]) > 1]
        tie_note = (
            f"; with {join_words(ties)} at a time the difference is within the spread"
            if ties
            else ""
        )
        return (
            "No speculative method is faster than plain decoding (none)"
            f" at any measured concurrency{tie_note}."
        )
    clauses: list[str] = []
    for _, group in groupby(
        concurrencies, key=lambda c: frozenset(cell.variant for cell in winners[c])
    ):
        part = list(group)
        first = not clauses
        where = concurrency_range(part, concurrencies, first)
        clauses.append(winner_clause(grid, [winners[c] for c in part], where, first))
    return "; ".join(clauses) + "."


def winner_clause(
    grid: Grid, winners: Sequence[Sequence[BenchCell]], where: str, first: bool
) -> str:
    """Consecutive concurrencies with the same winning methods. `first` in the sentence."""
    methods = sorted({cell.variant for cell in winners[0]})
    if methods == ["none"]:
        return f"{'Plain' if first else 'plain'} decoding (none) is fastest {where}"
    if "none" in methods:
        return (
            f"{'No' if first else 'no'} clear winner over plain decoding {where} (spreads overlap)"
        )
    speedups = [speedup.value for cells in winners if (speedup := grid.speedup(cells[0]))]
    gain = f"{value_range(speedups)} times plain decoding"
    if len(methods) == 1:
        return f"{winner_label([cells[0] for cells in winners])} is fastest {where}: {gain}"
    labels = join_words([method_label(method) for method in methods])
    return f"{labels} are level {where} (spreads overlap): {gain}"


def winner_label(winners: Sequence[BenchCell]) -> str:
    """The method and its K: a single one, or those in the order of concurrency."""
    method = method_label(winners[0].variant)
    if len({cell.k for cell in winners}) == 1:
        return cell_label(winners[0])
    runs = [list(group) for _, group in groupby(winners, key=lambda cell: cell.k)]
    if len(runs) > 3:
        return f"{method} (the best K changes with concurrency)"
    ranges = [
        f"K={run[0].k} {'at' if len(run) == 1 else 'from'} {run[0].concurrency}" for run in runs
    ]
    return f"{method} ({', '.join(ranges)})"


def value_range(values: Sequence[float]) -> str:
    low = f"{min(values):.2f}"
    high = f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def concurrency_range(part: Sequence[int], concurrencies: Sequence[int], first: bool) -> str:
    if len(part) == 1:
        return f"with {part[0]} at a time"
    if first and part[0] == concurrencies[0] and len(part) < len(concurrencies):
        return f"with up to {part[-1]} at a time"
    return f"with {part[0]} to {part[-1]} at a time"


def single_run_note(grid: Grid, concurrencies: Sequence[int]) -> str:
    single = [cell.spread is None for cell in grid.measured if cell.concurrency in concurrencies]
    if not any(single):
        return ""
    which = "One run per cell" if all(single) else "Some cells ran once"
    return f" {which}: the spread is not known."


def eagle3_sentence(grid: Grid) -> str | None:
    """P-EAGLE at its best K against EAGLE-3 at its best K, where both were measured."""
    pairs = [
        (c, p_eagle, eagle3)
        for c in grid.concurrencies
        if (p_eagle := grid.best(c, "p-eagle")) and (eagle3 := grid.best(c, "eagle3"))
    ]
    if not pairs:
        return None
    ratios = [(a.throughput or 0) / (b.throughput or 1) for _, a, b in pairs]
    tied = [str(c) for c, a, b in pairs if overlap(a.interval, b.interval)]
    sentence = (
        f"P-EAGLE at its best K runs at {value_range(ratios)} times"
        " the speed of EAGLE-3 at its best K"
    )
    if not tied:
        return f"{sentence}."
    if len(tied) == len(pairs):
        return f"{sentence}; the spreads overlap everywhere."
    return f"{sentence}; the spreads overlap with {join_words(tied)} at a time."
