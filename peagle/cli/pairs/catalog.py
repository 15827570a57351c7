import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Column, Table

from peagle.catalog.catalog import (
    DEFAULT_PAIR,
    all_pairs,
    find_pair,
    pair_names,
    read_pair,
    shipped_pairs,
)
from peagle.catalog.pair import DrafterSource, Pair
from peagle.catalog.production import Memory, Production
from peagle.cli.application import app, out
from peagle.cli.options import Json
from peagle.cli.pairs.check import print_finding
from peagle.errors import UserError
from peagle.paths import config_home

catalog_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(catalog_app, name="catalog")


@catalog_app.callback()
def main() -> None:
    """The pairs of this package, and your own."""


@app.command("pairs", hidden=True)
@catalog_app.command("list")
def list_pairs(as_json: Json = False) -> None:
    """List all pairs: drafter, K, requirements, and whether the target is on this machine.

    Example: peagle catalog list
    """
    pairs = all_pairs().values()
    if as_json:
        print(json.dumps([pair_to_json(pair) for pair in pairs], indent=2))
        return
    columns = ("drafter", "depth", "K (by load)", "vLLM", "memory", "here")
    table = Table(
        Column("pair", no_wrap=True),
        *columns,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for pair in pairs:
        name = f"[bold]{pair.name}[/]*" if pair.name == DEFAULT_PAIR else pair.name
        style = None if pair.name in shipped_pairs() else "cyan"
        table.add_row(name, *table_row(pair), "yes" if local_source(pair) else "-", style=style)
    out.print(
        table,
        f"* the default. Your own pairs are in {config_home() / 'pairs'};"
        " `peagle catalog show PAIR` shows details.",
        soft_wrap=True,
    )


def table_row(pair: Pair) -> tuple[str, str, str, str, str]:
    source = pair.drafters.get(pair.method)
    production = pair.production
    by_load = " ".join(f"{concurrency}:{k}" for concurrency, k in production.k.items())
    return (
        pair.method if source is None or source.trained else "untrained",
        value_text(source.depth) if source and source.trained else "-",
        f"{pair.k} ({by_load})" if by_load else f"{pair.k}",
        f">={production.vllm}" if production.vllm else value_text(None),
        f"{production.memory_gb:g} GB" if production.memory_gb else value_text(None),
    )


def value_text(value: Any) -> str:
    """The value as text; "unknown" if there is none."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "unknown"
    return "unknown" if value in (None, "", {}) else str(value)


@catalog_app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="PAIR", help="The pair.")], as_json: Json = False
) -> None:
    """Show everything that is known about a pair.

    Example: peagle catalog show gpt-oss-20b
    """
    pair = find_pair(name)
    if as_json:
        print(json.dumps(pair_to_json(pair), indent=2))
        return
    for label, text in detail_lines(pair):
        out.print(f"[bold]{label:<16}[/] {escape(text)}", highlight=False, soft_wrap=True)


def detail_lines(pair: Pair) -> list[tuple[str, str]]:
    """(label, text) of each line of `show`."""
    lines = [
        ("pair", pair.name),
        ("license", pair.license),
        ("target", value_text(pair.target.hub or pair.target.folder)),
    ]
    for method, drafter in pair.drafters.items():
        lines.append((f"{method} drafter", drafter_text(drafter)))
        if drafter.long_context:
            lines.append(("  beyond 10k", drafter.long_context))
    return [
        *lines,
        ("method, K", f"{pair.method}, {pair.k}"),
        *production_lines(pair.production),
        ("here", "yes" if local_source(pair) else "no"),
    ]


def drafter_text(drafter: DrafterSource) -> str:
    if not drafter.trained:
        return "untrained: built from sizes and a seed"
    format_name = value_text(drafter.format)
    depth = value_text(drafter.depth)
    return f"{drafter.hub or drafter.folder} ({format_name} format, trained depth {depth})"


def production_lines(production: Production) -> list[tuple[str, str]]:
    by_load = ", ".join(f"{k} from {c} requests on" for c, k in production.k.items())
    flags = ", ".join(f"--{flag} {value}" for flag, value in production.flags.items())
    jumpstart = f"{value_text(production.jumpstart_id)}, K {value_text(production.jumpstart_k)}"
    return [
        ("K by load", value_text(by_load)),
        ("vLLM", f">= {production.vllm}" if production.vllm else value_text(None)),
        ("context", value_text(production.context)),
        ("engine flags", flags or "none"),
        ("GPU memory", memory_text(production)),
        ("  from", memory_source_text(production.memory)),
        ("instances", value_text(production.instances)),
        ("JumpStart", "none" if production.jumpstart_id == "none" else jumpstart),
        ("channel", value_text(production.channel)),
    ]


def memory_text(production: Production) -> str:
    if production.memory_gb:
        return f"{production.memory_gb} GB for one request of that context"
    return f"unknown (weights alone {value_text(production.memory.weights_gb)} GB)"


def memory_source_text(memory: Memory) -> str:
    text = value_text(memory.source)
    if memory.weights and not memory.drafter:
        text += "; the drafter is not counted, its size is not known"
    return text


def local_source(pair: Pair) -> str | None:
    """The source of the target if it is on this machine."""
    from peagle.pull import receipt, target_folder

    folder = pair.target.folder
    if folder is not None and (folder.is_file() or (folder / "config.json").is_file()):
        return "folder"
    origin = receipt(target_folder(pair))
    return origin.source if origin else None


def pair_to_json(pair: Pair) -> dict[str, Any]:
    """null means unknown."""
    production = pair.production
    target = pair.target
    return {
        "name": pair.name,
        "target": target.hub or (str(target.folder) if target.folder else None),
        "method": pair.method,
        "k": pair.k,
        "trained": [method for method, drafter in pair.drafters.items() if drafter.trained],
        "license": pair.license,
        "pulled": local_source(pair),
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
        "k_by_concurrency": {str(c): k for c, k in production.k.items()} or None,
        "vllm": production.vllm,
        "context": production.context,
        "flags": dict(production.flags),
        "memory": {
            "need_gb": production.memory_gb,
            "weights_gb": production.memory.weights_gb,
            "position_bytes": production.memory.position,
            "drafter_counted": production.memory.drafter is not None,
            "source": production.memory.source or None,
        },
        "instances": list(production.instances) or None,
        "jumpstart_id": production.jumpstart_id,
        "jumpstart_k": production.jumpstart_k,
        "channel": production.channel,
    }


@catalog_app.command()
def validate(
    pairs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PAIR|FILE]...", help="Pairs or TOML files. Default: all pairs."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check all fields and folders of pairs, without a network. Exit code 2 on an error.

    Example: peagle catalog validate mine.toml
    """
    from peagle.catalog.validate import validate as validate_pair
    from peagle.export.check import Finding

    findings: dict[str, list[Finding]] = {}
    for name in pairs or pair_names():
        try:
            is_file = name.endswith(".toml")
            pair = read_pair(Path(name).expanduser()) if is_file else find_pair(name)
            findings[name] = validate_pair(pair)
        except UserError as error:
            findings[name] = [Finding("error", str(error))]
    failed = any(finding.level == "error" for group in findings.values() for finding in group)
    if as_json:
        content = {
            name: [{"level": finding.level, "text": finding.text} for finding in group]
            for name, group in findings.items()
        }
        print(json.dumps({"ok": not failed, "pairs": content}, indent=2))
    else:
        for name, group in findings.items():
            for finding in group:
                print_finding(finding, name)
    if failed:
        raise typer.Exit(2)
