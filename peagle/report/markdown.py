"""A Markdown table: a row for each method and K, a column for each concurrency."""

from collections.abc import Sequence

from peagle.report.grid import OVERALL, Grid, grids_by_set, set_names
from peagle.report.machines import Machine
from peagle.report.verdict import verdict
from peagle.report.words import DASH, TREE, amount, join_words
from peagle.results.cell import BenchCell
from peagle.results.run_info import RunInfo


def markdown(machines: Sequence[Machine], only_set: str | None = None) -> str:
    """One table for each machine: the mean over sets, or one set."""
    return "\n\n".join(machine_section(machine, only_set) for machine in machines)


def machine_section(machine: Machine, only_set: str | None = None) -> str:
    names = set_names(machine.cells)
    grids = grids_by_set(machine.cells, names)
    name = only_set or next(iter(grids))
    grid = grids[name] if name in grids else Grid(())
    info = machine.results[0].info
    sets = f"mean of {join_words(names)}" if name == OVERALL else name
    load = escape_text(load_text(info, sets))
    heading = (
        f"**{escape_text(info.pair_name)}** on {escape_text(machine.label)}, {load}."
        f" {escape_text(verdict(grid))}"
    )
    return "\n\n".join([heading, table(grid), *command_lines(machine)])


def command_lines(machine: Machine) -> list[str]:
    commands = dict.fromkeys(
        result.info.command for result in machine.results if result.info.command
    )
    quoted = [f"`{escape_code(command)}`" for command in commands]
    if len(quoted) == 1:
        return [f"Measured by {quoted[0]}"]
    return ["\n".join(f"- {command}" for command in quoted)] if quoted else []


def load_text(info: RunInfo, sets: str) -> str:
    """The load that was measured: sets, dtype, weights, answer length, sampling."""
    parts = [sets]
    if info.target.get("dtype"):
        parts.append(str(info.target["dtype"]))
    weights = info.target.get("weights")
    if weights and weights != info.target.get("dtype"):
        parts.append(f"weights in {weights}")
    if info.settings.get("max_tokens"):
        parts.append(f"answers of up to {info.settings['max_tokens']} tokens")
    temperature = info.settings.get("temperature")
    if temperature is not None:
        parts.append("greedy" if temperature == 0 else f"temperature {temperature}")
    return ", ".join(parts)


def table(grid: Grid) -> str:
    forms = list(dict.fromkeys((cell.variant, cell.k) for cell in grid.cells))
    heads = ["tokens/s (× `none`)", "acceptance length", *(f"c={c}" for c in grid.concurrencies)]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    for method, k in forms:
        cells = [grid.at(method, k, c) for c in grid.concurrencies]
        comma = "," if TREE in method else ""
        row = [
            f"`{escape_code(method)}`" + ("" if method == "none" else f"{comma} K={k}"),
            mean_acceptance_length(method, cells),
            *(cell_text(grid, cell) for cell in cells),
        ]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def mean_acceptance_length(method: str, cells: Sequence[BenchCell | None]) -> str:
    lengths = [
        cell.spec_decode_acceptance_length
        for cell in cells
        if cell is not None and cell.spec_decode_acceptance_length is not None
    ]
    if lengths:
        return amount(sum(lengths) / len(lengths))
    return "1.00" if method == "none" else DASH


def cell_text(grid: Grid, cell: BenchCell | None) -> str:
    """Throughput and speed-up; bold for the fastest of its concurrency."""
    if cell is None:
        return DASH
    speedup = grid.speedup(cell) if cell.variant != "none" else None
    text = amount(cell.throughput) + (f" ({speedup.value:.2f}×)" if speedup else "")
    best = grid.best(cell.concurrency)
    return f"**{text}**" if best is not None and cell.key == best.key else text


def escape_text(text: str) -> str:
    """Text of a result file for Markdown: no markup, no HTML, one line."""
    for letter in "\\`*_[]|":
        text = text.replace(letter, f"\\{letter}")
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").split())


def escape_code(text: str) -> str:
    """Text of a result file for a code span in a table."""
    text = text.replace("`", "'").replace("|", "\\|")
    return " ".join(text.replace("<!--", "< !--").replace("-->", "-- >").split())
