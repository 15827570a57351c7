"""The context curve as a table on the screen, as a figure, and in the card of a drafter."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from peagle.errors import UserError
from peagle.evaluate.context_curve import ContextCurve, ContextPoint
from peagle.paths import write_text
from peagle.train.curves import import_pyplot, save_figure

CARD_TITLE = "## Acceptance length by context"
FIGURE_NAME = "context.png"


def print_context_table(curve: ContextCurve, console: Console) -> None:
    console.print(
        f"acceptance length by context, {curve.conditions}, {curve.dtype}"
        " (speed as a ratio to none):",
        highlight=False,
        soft_wrap=True,
    )
    sets = curve.by_set
    table = Table("context", "prompt tokens", *map(escape, sets))
    for row in zip(*sets.values(), strict=True):
        tokens = sum(point.prompt_tokens for point in row) / len(row)
        table.add_row(f"{row[0].context}", f"{tokens:.0f}", *map(point_text, row))
    console.print(table)


def context_table(curve: ContextCurve) -> list[str]:
    """A row for each context length, a column for each set."""
    sets = curve.by_set
    lines = [
        "| context | " + " | ".join(sets) + " |",
        "|---|" + "---|" * len(sets),
    ]
    for row in zip(*sets.values(), strict=True):
        cells = " | ".join(point_text(point) for point in row)
        lines.append(f"| {row[0].context:,} | {cells} |")
    return lines


def point_text(point: ContextPoint) -> str:
    """The acceptance length and, where it was measured, the speed as a ratio to `none`."""
    length = f"{point.result.acceptance_length:.2f}"
    return length if point.ratio_to_none is None else f"{length} ({point.ratio_to_none:.2f} x)"


def draw_context_curve(curve: ContextCurve, path: Path) -> bool:
    """Draw the curve of every set; False without matplotlib."""
    pyplot = import_pyplot()
    if pyplot is None:
        return False
    figure, axis = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    for name, points in curve.by_set.items():
        lengths = [point.result.acceptance_length for point in points]
        axis.plot([point.context for point in points], lengths, "o-", label=name)
    axis.set_xscale("log", base=2)
    _label_contexts(axis, sorted({point.context for point in curve.points}))
    axis.set(
        xlabel="tokens of the prompt and its answer",
        ylabel="acceptance length",
        ylim=(1, None),
        title=f"{curve.pair}\n{curve.conditions}",
    )
    axis.legend()
    save_figure(pyplot, figure, path)
    return True


def _label_contexts(axis: Any, contexts: Sequence[int]) -> None:
    axis.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axis.minorticks_off()


def add_to_card(curve: ContextCurve, folder: Path) -> None:
    """Write the curve into the card of the drafter in `folder`, in place of an earlier one."""
    card = folder / "README.md"
    if not card.is_file():
        raise UserError(f"{folder} has no README.md: give `card` the folder of a published drafter")
    before, _, rest = card.read_text().partition(CARD_TITLE)
    _, heading, after = rest.partition("\n## ")
    section = "\n".join(card_section(curve, draw_context_curve(curve, folder / FIGURE_NAME)))
    write_text(card, f"{before.rstrip()}\n\n{section}\n{heading}{after}")


def card_section(curve: ContextCurve, has_figure: bool) -> list[str]:
    settings = curve.settings
    sampling = f"temperature {settings.temperatures[0]:g}" if settings.temperatures[0] else "greedy"
    counts = sorted({point.result.tasks for point in curve.points})
    prompts = " to ".join(map(str, counts[:1] + counts[1:][-1:]))
    lines = [
        CARD_TITLE,
        "",
        f"{curve.conditions}, {sampling}, {prompts} prompts for each length, answers of"
        f" at most {settings.max_tokens} tokens, {curve.dtype}; in parentheses the speed of"
        " decoding as a ratio to that without drafts, if it was measured. `peagle evaluate"
        " --context` joins texts of a set in front of a question; those of a set with fewer tokens"
        " than the context repeat.",
        "",
        *context_table(curve),
    ]
    return [*lines, "", f"![acceptance length by context]({FIGURE_NAME})"] if has_figure else lines
