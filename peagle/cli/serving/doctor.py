"""peagle doctor."""

import json
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from peagle.catalog import DEFAULT_PAIR, find_pair
from peagle.cli.application import app, err, out
from peagle.cli.options import Json


@app.command()
def doctor(
    pair: Annotated[
        str, typer.Argument(help="The pair whose matrices are timed; nothing is downloaded.")
    ] = DEFAULT_PAIR,
    as_json: Json = False,
) -> None:
    """Show what this machine has, which kernels and dtype run on it, and why not better ones.

    Example: peagle doctor --json
    """
    chosen = find_pair(pair)
    with err.status("compiling kernels and timing weights, once per machine ..."):
        from peagle.doctor import examine

        report = examine(chosen)
    if as_json:
        print(json.dumps(report.as_dict(), ensure_ascii=False))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for heading, line in report.lines():
        table.add_row(heading, Text(line))
    out.print(table)
