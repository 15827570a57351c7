import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from peagle.catalog import find_pair
from peagle.cli.application import app, name_options, out
from peagle.cli.options import Json, Target

if TYPE_CHECKING:
    from peagle.export.check import Finding

LEVEL_MARKUP = {
    "ok": "[green]ok[/]",
    "warning": "[yellow]warning[/]",
    "error": "[bold red]error[/]",
}


@app.command()
def check(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a drafter in any of the three formats.")
    ],
    target: Target = None,
    as_json: Json = False,
) -> None:
    """Find the errors of a drafter: tensors, mask id, aux layers, context, drafts of its exports.

    Exit code 2 if there is an error. With a target, much more can be checked.

    Example: peagle check exported/ --target smollm2-135m
    """
    from peagle.export.check import check as check_folder
    from peagle.loaded import load

    loaded = (
        load(find_pair(target), dtype="float32", device="cpu", stored=False) if target else None
    )
    findings = [
        replace(finding, text=name_options(finding.text, context.command))
        for finding in check_folder(folder, loaded.target if loaded else None)
    ]
    failed = any(finding.level == "error" for finding in findings)
    if as_json:
        content = [asdict(finding) for finding in findings]
        print(json.dumps({"folder": str(folder), "ok": not failed, "findings": content}))
    else:
        for finding in findings:
            print_finding(finding)
    if failed:
        raise typer.Exit(2)


def print_finding(finding: "Finding", subject: str = "") -> None:
    text = f"{subject}: {finding.text}" if subject else finding.text
    out.print(f"{LEVEL_MARKUP[finding.level]}  {escape(text)}", highlight=False, soft_wrap=True)
