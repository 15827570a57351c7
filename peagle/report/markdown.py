"""A table to paste: a row a method and K, a column a concurrency."""

from peagle.report.grid import OVERALL, Grid, grids, sets_of
from peagle.report.machines import Machine
from peagle.report.verdict import verdict
from peagle.report.words import DASH, TREE, amount, listed
from peagle.results.runs import ResultRun

LENGTH = "spec_decode_acceptance_length"


def markdown(machines: list[Machine], only: str | None = None) -> str:
    """One table a machine: the mean over sets, or one set."""
    return "\n\n".join(part(machine, only) for machine in machines)


def part(machine: Machine, only: str | None = None) -> str:
    names = sets_of(machine.cells)
    found = grids(machine.cells, names)
    name = only or next(iter(found))
    grid = found[name] if name in found else Grid(())
    run = machine.runs[0]
    sets = f"mean of {listed(names)}" if name == OVERALL else name
    head = f"**{plain(run.pair)}** on {plain(machine.label)}, {plain(load(run, sets))}. {plain(verdict(grid))}"
    commands = dict.fromkeys(str(r.raw["command"]) for r in machine.runs if r.raw.get("command"))
    shown = [f"`{code(command)}`" for command in commands]
    told = (
        [f"Measured by {shown[0]}"]
        if len(shown) == 1
        else ["\n".join(f"- {one}" for one in shown)]
        if shown
        else []
    )
    return "\n\n".join([head, table(grid), *told])


def load(run: ResultRun, sets: str) -> str:
    """What was asked of it."""
    settings, parts = run.section("settings"), [sets]
    parts += [str(run.target["dtype"])] if run.target.get("dtype") else []
    parts += (
        [f"answers of up to {settings['max_tokens']} tokens"] if settings.get("max_tokens") else []
    )
    temperature = settings.get("temperature")
    parts += (
        ["greedy" if temperature == 0 else f"temperature {temperature}"]
        if temperature is not None
        else []
    )
    return ", ".join(parts)


def table(grid: Grid) -> str:
    rows = list(dict.fromkeys((cell.method, cell.k) for cell in grid.cells))
    best = {c: found.key for c in grid.concurrencies if (found := grid.best(c))}
    heads = ["tokens/s (× `none`)", "acceptance length", *(f"c={c}" for c in grid.concurrencies)]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    for method, k in rows:
        cells = [grid.at(method, k, c) for c in grid.concurrencies]
        known = [value for cell in cells if cell and (value := cell.number(LENGTH)) is not None]
        comma = "," if TREE in method else ""
        shown = [f"`{code(method)}`" + ("" if method == "none" else f"{comma} K={k}")]
        shown.append(
            amount(sum(known) / len(known)) if known else "1.00" if method == "none" else DASH
        )
        for cell in cells:
            text = DASH
            if cell is not None:
                gain = grid.speed_up(cell) if method != "none" else None
                text = amount(cell.throughput) + (f" ({gain.value:.2f}×)" if gain else "")
                text = f"**{text}**" if cell.key == best[cell.concurrency] else text
            shown.append(text)
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


def plain(text: str) -> str:
    """Text of a result file in Markdown: no markup, no HTML, one line."""
    for letter in "\\`*_[]|":
        text = text.replace(letter, f"\\{letter}")
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").split())


def code(text: str) -> str:
    return " ".join(
        text.replace("`", "'")
        .replace("|", "\\|")
        .replace("<!--", "< !--")
        .replace("-->", "-- >")
        .split()
    )
