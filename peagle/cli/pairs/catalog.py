import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Column, Table

from peagle.catalog.catalog import DEFAULT_PAIR, catalog, find, names, read_pair, shipped
from peagle.catalog.pair import Pair
from peagle.cli.application import app, out
from peagle.cli.options import Json
from peagle.cli.pairs.check import MARKS
from peagle.errors import UserError
from peagle.paths import config_home

catalog_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(catalog_app, name="catalog")


@catalog_app.callback()
def main() -> None:
    """The pairs: those of this package, and your own."""


@app.command("pairs", hidden=True)
@catalog_app.command("list")
def listing(as_json: Json = False) -> None:
    """List every pair: its drafter, its K, what serving it takes, and whether its target is on this machine.

    Example: peagle catalog list
    """
    pairs = catalog().values()
    if as_json:
        print(json.dumps([as_dict(pair) for pair in pairs], indent=2))
        return
    rest = ("drafter", "depth", "K (by load)", "vLLM", "memory", "here")
    table = Table(
        Column("pair", no_wrap=True),
        *rest,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for pair in pairs:
        name = f"[bold]{pair.name}[/]*" if pair.name == DEFAULT_PAIR else pair.name
        table.add_row(
            name,
            *row(pair),
            "yes" if here(pair) else "-",
            style=None if pair.name in shipped() else "cyan",
        )
    own = config_home() / "pairs"
    out.print(
        table,
        f"* the default. Your own lie in {own}; `peagle catalog show PAIR` tells more.",
        soft_wrap=True,
    )


def row(pair: Pair) -> tuple[str, str, str, str, str]:
    source, told = pair.drafters.get(pair.method), pair.production
    depth = known(source.depth) if source and source.trained else "-"
    return (
        pair.method if source is None or source.trained else "untrained",
        depth,
        f"{pair.k}" + (f" ({' '.join(f'{c}:{k}' for c, k in told.k.items())})" if told.k else ""),
        f">={told.vllm}" if told.vllm else known(None),
        f"{told.memory_gb:g} GB" if told.memory_gb else known(None),
    )


def known(value: Any) -> str:
    """Unknown is said in one word, everywhere."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "unknown"
    return "unknown" if value in (None, "", {}) else str(value)


@catalog_app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="PAIR", help="The pair.")], as_json: Json = False
) -> None:
    """Show all that is known of a pair.

    Example: peagle catalog show gpt-oss-20b
    """
    pair = find(name)
    if as_json:
        print(json.dumps(as_dict(pair), indent=2))
        return
    for key, value in lines(pair):
        out.print(f"[bold]{key:<16}[/] {escape(value)}", highlight=False, soft_wrap=True)


def lines(pair: Pair) -> list[tuple[str, str]]:
    target, told = pair.target, pair.production
    found = [
        ("pair", pair.name),
        ("license", pair.license),
        ("target", known(target.hub or target.folder)),
    ]
    for method, drafter in pair.drafters.items():
        place = drafter.hub or drafter.folder or "untrained: built from sizes and a seed"
        form = (
            f" ({known(drafter.format)} format, trained depth {known(drafter.depth)})"
            if drafter.trained
            else ""
        )
        found.append((f"{method} drafter", f"{place}{form}"))
        found += [("  beyond 10k", drafter.long_context)] if drafter.long_context else []
    load = ", ".join(f"{k} from {c} requests on" for c, k in told.k.items())
    memory = told.memory
    need = (
        f"{known(told.memory_gb)} GB"
        if told.memory_gb
        else f"unknown (weights alone {known(memory.weights_gb)} GB)"
    )
    uncounted = (
        ""
        if memory.drafter or not memory.weights
        else "; the drafter is not counted, its size is not known"
    )
    return [
        *found,
        ("method, K", f"{pair.method}, {pair.k}"),
        ("K by load", known(load)),
        ("vLLM", f">= {told.vllm}" if told.vllm else known(None)),
        ("context", known(told.context)),
        (
            "engine flags",
            ", ".join(f"--{flag} {value}" for flag, value in told.flags.items()) or "none",
        ),
        ("GPU memory", f"{need} for one request of that context" if told.memory_gb else need),
        ("  from", f"{known(memory.source)}{uncounted}"),
        ("instances", known(told.instances)),
        (
            "JumpStart",
            f"{known(told.jumpstart_id)}, K {known(told.jumpstart_k)}"
            if on_jumpstart(pair)
            else "none",
        ),
        ("channel", known(told.channel)),
        ("here", "yes" if here(pair) else "no"),
    ]


def on_jumpstart(pair: Pair) -> bool:
    return pair.production.jumpstart_id != "none"


def here(pair: Pair) -> str | None:
    """Where the target was pulled from, if it lies on this machine."""
    from peagle.pull import receipt, target_folder

    if pair.target.folder is not None and (pair.target.folder / "config.json").is_file():
        return "folder"
    return (receipt(target_folder(pair)) or {}).get("source")


def as_dict(pair: Pair) -> dict[str, Any]:
    """null: unknown."""
    told, target = pair.production, pair.target
    return {
        "name": pair.name,
        "target": target.hub or (str(target.folder) if target.folder else None),
        "method": pair.method,
        "k": pair.k,
        "trained": [method for method, drafter in pair.drafters.items() if drafter.trained],
        "license": pair.license,
        "pulled": here(pair),
        "drafters": {
            method: {
                "hub": drafter.hub,
                "folder": str(drafter.folder) if drafter.folder else None,
                "long_context": drafter.long_context,
                "format": drafter.format,
                "depth": drafter.depth,
            }
            for method, drafter in pair.drafters.items()
        },
        "k_by_concurrency": {str(c): k for c, k in told.k.items()} or None,
        "vllm": told.vllm,
        "context": told.context,
        "flags": dict(told.flags),
        "memory": {
            "need_gb": told.memory_gb,
            "weights_gb": told.memory.weights_gb,
            "position_bytes": told.memory.position,
            "drafter_counted": told.memory.drafter is not None,
            "source": told.memory.source or None,
        },
        "instances": list(told.instances) or None,
        "jumpstart_id": told.jumpstart_id,
        "jumpstart_k": told.jumpstart_k,
        "channel": told.channel,
    }


@catalog_app.command()
def validate(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PAIR|FILE]...", help="Pairs or TOML files. Default: every pair."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check pairs as far as it can be done offline: every field, folders and what they hold. Exit code 2 on an error.

    Example: peagle catalog validate mine.toml
    """
    from peagle.catalog.validate import validate as check
    from peagle.export.check import Finding

    found: dict[str, list[Finding]] = {}
    for word in what or names():
        try:
            found[word] = check(
                read_pair(Path(word).expanduser()) if word.endswith(".toml") else find(word)
            )
        except UserError as error:
            found[word] = [Finding("error", str(error))]
    failed = any(finding.level == "error" for findings in found.values() for finding in findings)
    if as_json:
        said = {
            word: [{"level": f.level, "text": f.text} for f in findings]
            for word, findings in found.items()
        }
        print(json.dumps({"ok": not failed, "pairs": said}, indent=2))
    for word, findings in found.items() if not as_json else ():
        for finding in findings:
            out.print(
                f"{MARKS[finding.level]}  {word}: {escape(finding.text)}",
                highlight=False,
                soft_wrap=True,
            )
    if failed:
        raise typer.Exit(2)
