import json
from typing import Any

from rich.table import Column, Table

from peagle.catalog import DEFAULT_PAIR, catalog
from peagle.cli import app, out
from peagle.cli.options import Json
from peagle.core import Pair
from peagle.home import home
from peagle.pull import receipt, target_folder


@app.command()
def pairs(as_json: Json = False) -> None:
    """List the pairs this package knows, and which targets are on this machine.

    Example: peagle pairs
    """
    found = {pair.name: receipt(target_folder(pair)) for pair in catalog().values()}
    if as_json:
        print(json.dumps([as_dict(pair, found[pair.name]) for pair in catalog().values()], indent=2))
        return
    table = Table("pair", Column("target", overflow="fold"), "K", "trained drafters", "pulled from")
    for pair in catalog().values():
        name = f"[bold]{pair.name}[/]*" if pair.name == DEFAULT_PAIR else pair.name
        here = found[pair.name]
        table.add_row(
            name,
            pair.target.hub,
            str(pair.k),
            ", ".join(trained(pair)) or "none yet",
            here["source"] if here else "-",
        )
    out.print(table, f"* the default. Targets lie in {home() / 'targets'}.")


def trained(pair: Pair) -> list[str]:
    return [method for method, drafter in pair.drafters.items() if drafter.trained]


def as_dict(pair: Pair, found: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "name": pair.name,
        "target": pair.target.hub,
        "method": pair.method,
        "k": pair.k,
        "trained": trained(pair),
        "license": pair.license,
        "pulled": found["source"] if found else None,
    }
