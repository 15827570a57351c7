import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from peagle.catalog import find
from peagle.cli.application import app, out
from peagle.cli.options import Json, Target

MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "error": "[bold red]error[/]"}


@app.command()
def check(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A drafter's folder, in any of the three formats.")
    ],
    target: Target = None,
    as_json: Json = False,
) -> None:
    """Find what is wrong with a drafter: tensors, mask id, aux layers, context, and whether exports draft the same.

    Exit code 2 if there is an error. With a target, much more can be checked.

    Example: peagle check exported/ --target smollm2-135m
    """
    from peagle.export.check import check as find_all
    from peagle.loaded import load

    loaded = load(find(target), dtype="float32", device="cpu") if target else None
    findings = find_all(folder, loaded.target if loaded else None)
    failed = any(finding.level == "error" for finding in findings)
    if as_json:
        print(
            json.dumps(
                {"folder": str(folder), "ok": not failed, "findings": [asdict(f) for f in findings]}
            )
        )
    else:
        for finding in findings:
            out.print(
                f"{MARKS[finding.level]:>8}  {escape(finding.text)}",
                highlight=False,
                soft_wrap=True,
            )
    if failed:
        raise typer.Exit(2)
