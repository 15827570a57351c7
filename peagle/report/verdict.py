"""The result in one sentence, for a person who decides. Where spreads overlap nobody has won."""

from itertools import groupby

from peagle.report.grid import Grid
from peagle.report.words import label, listed, method_label
from peagle.results.runs import ResultCell, overlap


def verdict(grid: Grid) -> str:
    """Such as: P-EAGLE K=7 is fastest with up to 16 requests at a time: 1.6 to 2.4 times plain decoding."""
    if not grid.measured:
        return "Nothing could be measured: every request failed."
    if not grid.drafting:
        return "Only plain decoding (none) was measured: there is nothing to compare."
    if "none" not in grid.methods:
        return f"Plain decoding (none) was not measured, so no speed-up can be told. {told_fastest(grid)}"
    places = [
        c
        for c in grid.concurrencies
        if grid.none(c) and any(grid.best(c, m) for m in grid.drafting)
    ]
    if not places:
        return "Plain decoding (none) and the others were measured at different concurrencies: nothing can be compared."
    return f"{told_outcomes(grid, places)}{told_spread(grid, places)}"


def told_fastest(grid: Grid) -> str:
    best = [(c, cell) for c in grid.concurrencies if (cell := grid.best(c))]
    return f"Fastest: {listed([f'{label(cell)} with {c} at a time' for c, cell in best])}."


def told_outcomes(grid: Grid, places: list[int]) -> str:
    levels = {c: grid.level(c) for c in places}
    if all(levels[c][0].method == "none" for c in places):
        ties = [c for c in places if len(levels[c]) > 1]
        but = (
            f"; with {listed([str(c) for c in ties])} at a time the difference is within the spread"
            if ties
            else ""
        )
        return f"No speculative method is faster than plain decoding (none) at any measured concurrency{but}."
    told: list[str] = []
    for _, group in groupby(places, key=lambda c: frozenset(cell.method for cell in levels[c])):
        part = list(group)
        told.append(
            told_part(
                grid, [levels[c] for c in part], span(part, places, first=not told), first=not told
            )
        )
    return "; ".join(told) + "."


def told_part(grid: Grid, levels: list[list[ResultCell]], where: str, first: bool) -> str:
    """Consecutive concurrencies with the same winners."""
    methods = sorted({cell.method for cell in levels[0]})
    if methods == ["none"]:
        return f"{'Plain' if first else 'plain'} decoding (none) is fastest {where}"
    if "none" in methods:
        return (
            f"{'No' if first else 'no'} clear winner over plain decoding {where} (spreads overlap)"
        )
    ratios = [found.value for level in levels if (found := grid.speed_up(level[0]))]
    gain = f"{between(ratios)} times plain decoding"
    if len(methods) == 1:
        return f"{named([level[0] for level in levels])} is fastest {where}: {gain}"
    return (
        f"{listed([method_label(m) for m in methods])} are level {where} (spreads overlap): {gain}"
    )


def named(winners: list[ResultCell]) -> str:
    """The method, and its K: one, or in the order of concurrency."""
    ks = [str(k) for k, _ in groupby(cell.k for cell in winners)]
    if len(set(ks)) == 1:
        return label(winners[0])
    runs = [list(group) for _, group in groupby(winners, key=lambda cell: cell.k)]
    if len(runs) > 3:
        return f"{method_label(winners[0].method)} (the best K changes with concurrency)"
    told = [
        f"K={run[0].k} {'at' if len(run) == 1 else 'from'} {run[0].concurrency}" for run in runs
    ]
    return f"{method_label(winners[0].method)} ({', '.join(told)})"


def between(values: list[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def span(part: list[int], places: list[int], first: bool) -> str:
    if len(part) == 1:
        return f"with {part[0]} at a time"
    if first and part[0] == places[0] and len(part) < len(places):
        return f"with up to {part[-1]} at a time"
    return f"with {part[0]} to {part[-1]} at a time"


def told_spread(grid: Grid, places: list[int]) -> str:
    once = [cell.spread() is None for cell in grid.measured if cell.concurrency in places]
    if not any(once):
        return ""
    which = "One run a cell" if all(once) else "Some cells ran once"
    return f" {which}: how far another would fall from it is not known."


def against_eagle3(grid: Grid) -> str | None:
    """P-EAGLE at its best K against EAGLE-3 at its own, where both were measured."""
    both = [(c, grid.best(c, "p-eagle"), grid.best(c, "eagle3")) for c in grid.concurrencies]
    pairs = [(c, one, two) for c, one, two in both if one and two]
    if not pairs:
        return None
    ratios = [(one.throughput or 0) / (two.throughput or 1) for _, one, two in pairs]
    level = [c for c, one, two in pairs if overlap(one.interval(), two.interval())]
    told = (
        f"P-EAGLE at its best K runs at {between(ratios)} times the speed of EAGLE-3 at its best K"
    )
    if len(level) == len(pairs):
        return f"{told}; the spreads overlap everywhere."
    return (
        f"{told}; the spreads overlap with {listed([str(c) for c in level])} at a time."
        if level
        else f"{told}."
    )
