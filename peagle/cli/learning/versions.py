import shutil
from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.application import out
from peagle.cli.learning.group import Folder, learn_app, open_folder
from peagle.errors import UserError

Version = Annotated[
    int | None, typer.Option("--version", help="Number of a version; 0: the pair's.")
]
DRAFTER_FILES = ("config.json", "model.safetensors")


@learn_app.command()
def rollback(folder: Folder, version: Version = None) -> None:
    """Return to the version before, or to any version. A running server swaps it in.

    Example: peagle learn rollback learned --version 0
    """
    from peagle.learn.events import append_event
    from peagle.learn.versions import read_current, rollback

    opened = open_folder(folder)
    left = read_current(opened).number
    current = rollback(opened, version)
    text = f"version {left} -> {current.number}, by `peagle learn rollback`"
    append_event(opened.events, "rolled back", text, current.number)
    out.print(f"the current version is {current.number}", highlight=False)


@learn_app.command()
def export(
    folder: Folder,
    to: Annotated[Path, typer.Option("--out", help="A new folder for the drafter.")],
    version: Version = None,
) -> None:
    """Write the current version, or any other, as a drafter for --drafter and `peagle export`.

    Example: peagle learn export learned --out my-drafter
    """
    from peagle.learn.versions import read_current, read_version, version_folder
    from peagle.paths import checkpoint_folder, publish_folder

    opened = open_folder(folder)
    number = read_current(opened).number if version is None else version
    if number == 0:
        raise UserError("version 0 is the drafter that the pair ships: there is nothing to export")
    read_version(opened, number)
    source = version_folder(opened, number)
    if missing := [name for name in DRAFTER_FILES if not (source / name).is_file()]:
        raise UserError(f"version {number} has no {missing[0]} any more: choose another version")
    with publish_folder(checkpoint_folder(to)) as staging:
        for name in DRAFTER_FILES:
            shutil.copy(source / name, staging / name)
    out.print(f"wrote version {number} to {to}", highlight=False)


@learn_app.command()
def purge(
    folder: Folder,
    versions: Annotated[
        bool, typer.Option("--versions", help="Delete the versions too; serve the pair's drafter.")
    ] = False,
) -> None:
    """Delete all stored requests, also while a server runs. Versions stay unless asked for.

    Example: peagle learn purge learned
    """
    from peagle.learn.events import append_event
    from peagle.learn.store_reader import purge_documents
    from peagle.learn.training.round_folder import RoundFolder
    from peagle.learn.versions import set_current

    opened = open_folder(folder)
    size = purge_documents(opened)
    RoundFolder(opened).discard()
    if versions:
        set_current(opened, 0, "the versions were purged")
        shutil.rmtree(opened.versions, ignore_errors=True)
    text = f"{size.bytes / 1e6:.1f} MB in {size.segments} segments"
    append_event(opened.events, "purged", text)
    out.print(f"deleted {text}", highlight=False)
