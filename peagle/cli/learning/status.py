import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Column, Table

from peagle.cli.application import out
from peagle.cli.learning.group import Folder, learn_app, open_folder
from peagle.cli.options import Json

if TYPE_CHECKING:
    from peagle.learn.folder import LearnFolder
    from peagle.learn.versions import VersionRecord


@learn_app.command()
def status(
    folder: Folder,
    figure: Annotated[
        Path | None,
        typer.Option("--figure", metavar="FILE", help="Draw the versions to a PNG file."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the versions of a drafter, what they were learned from, and what the trainer does.

    Example: peagle learn status learned --figure versions.png
    """
    from peagle.learn.versions import list_versions

    opened = open_folder(folder)
    records = list_versions(opened)
    if as_json:
        print(json.dumps(status_json(opened, records), indent=2))
    else:
        print_status(opened, records)
    if figure is not None:
        from peagle.learn.figure import draw_versions

        draw_versions(records, figure)
        out.print(f"wrote {figure}", highlight=False)


def status_json(folder: "LearnFolder", records: "list[VersionRecord]") -> dict[str, object]:
    from peagle.learn.status import read_status
    from peagle.learn.store_reader import store_size
    from peagle.learn.versions import read_current

    return {
        "store": asdict(store_size(folder)),
        "trainer": asdict(read_status(folder)),
        "current": asdict(read_current(folder)),
        "versions": [asdict(record) for record in records],
    }


def print_status(folder: "LearnFolder", records: "list[VersionRecord]") -> None:
    from peagle.learn.status import read_status
    from peagle.learn.store_reader import store_size
    from peagle.learn.versions import read_current

    identity = folder.read_identity()
    size = store_size(folder)
    trainer = read_status(folder)
    current = read_current(folder).number
    assert identity is not None
    out.print(f"target  {identity.target}", highlight=False)
    out.print(f"store   {size.bytes / 1e6:.1f} MB in {size.segments} segments", highlight=False)
    progress = f", step {trainer.step} of {trainer.steps}" if trainer.pid else ""
    out.print(
        f"trainer {trainer.state}{progress}; {trainer.new_documents} new documents",
        highlight=False,
    )
    if trainer.error:
        out.print(f"        last failure: {trainer.error}", highlight=False, soft_wrap=True)
    print_versions(records, current)


def print_versions(records: "list[VersionRecord]", current: int) -> None:
    columns = ("from", "judged", "docs", "steps", "length", "ratio", "replay", "state")
    table = Table(
        *(Column(name, no_wrap=True) for name in ("version", *columns)),
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    mark = " *" if current == 0 else ""
    table.add_row(f"0{mark}", *(len(columns) - 1) * [""], "the pair's")
    for record in records:
        table.add_row(*version_row(record, current))
    out.print(table, highlight=False)
    out.print("* the current version", highlight=False)


def version_row(record: "VersionRecord", current: int) -> list[str]:
    held_back = record.held_back
    replay = record.replay
    mark = " *" if record.number == current else ""
    return [
        f"{record.number}{mark}",
        str(record.parent),
        time.strftime("%m-%d %H:%M", time.localtime(record.time)),
        str(record.documents),
        str(record.steps),
        f"{held_back.before:.2f} -> {held_back.after:.2f}" if held_back else "",
        f"{held_back.low:.2f} to {held_back.high:.2f}" if held_back else "",
        f"{replay.ratio:.3f}" if replay else "",
        record.state,
    ]
