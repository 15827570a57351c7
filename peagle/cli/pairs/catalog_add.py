from pathlib import Path
from typing import Annotated, Any

import typer

from peagle.catalog.catalog import read_toml, shipped, user_files
from peagle.catalog.entry import parse_pair
from peagle.cli.options import K
from peagle.cli.options import Method as MethodOption
from peagle.cli.pairs.catalog import catalog_app
from peagle.errors import UserError
from peagle.paths import config_home, write_text


@catalog_app.command()
def add(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE", help="What to call the pair, or NAME.toml with it all."
        ),
    ],
    target: Annotated[
        str | None, typer.Option("--target", help="A hub id or a folder.", show_default=False)
    ] = None,
    drafter: Annotated[
        str | None, typer.Option("--drafter", help="A hub id or a folder.", show_default=False)
    ] = None,
    method: MethodOption = None,
    k: K = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format", help="The drafter's: peagle, vllm or speculators.", show_default=False
        ),
    ] = None,
    depth: Annotated[
        int | None, typer.Option("--depth", help="K in its training.", show_default=False)
    ] = None,
    vllm: Annotated[
        str | None, typer.Option("--vllm", help="The first version, like 0.18.", show_default=False)
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", help="Tokens of a request.", show_default=False)
    ] = None,
    license: Annotated[
        str | None, typer.Option("--license", help="The target's.", show_default=False)
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a pair of yours by that name.")
    ] = False,
) -> None:
    """Add a pair of your own to the config folder: every command that takes PAIR then knows it.

    Example: peagle catalog add mine --target Qwen/Qwen3-0.6B --drafter trained/ -k 5
    """
    if name.endswith(".toml"):
        path = Path(name).expanduser()
        if any(
            value is not None
            for value in (target, drafter, method, k, form, depth, vllm, context, license)
        ):
            raise UserError(
                f"{name} says it all: leave the other options out, or give a name instead of the file"
            )
        name, entry = path.stem, resolved(read_toml(path), path.resolve().parent)
    else:
        if target is None:
            raise UserError("a pair needs a target: give --target HUB_ID or --target DIR")
        sizes = {"vllm": vllm, "context": context}
        entry = {
            "license": license,
            "method": method,
            "k": k,
            "target": place(target),
            "production": given(sizes),
        }
        if drafter is not None:
            method, described = described_drafter(drafter, method, form, depth)
            entry |= {"method": method, "drafters": {method: described}}
        elif method is None:
            entry["method"] = "none"
    keep(name, given(entry), force)


def keep(name: str, entry: dict[str, Any], force: bool) -> None:
    import tomli_w

    if name in shipped():
        raise UserError(f"{name!r} is a pair of peagle's own: choose another name")
    if name in user_files() and not force:
        raise UserError(f"there is a pair {name!r} of yours already: --force replaces it")
    path = config_home() / "pairs" / f"{name}.toml"
    parse_pair(name, entry, path.parent, name)
    write_text(path, tomli_w.dumps(entry))
    print(f"{name}: {path}")


def given(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if value not in (None, {})}


def place(word: str) -> dict[str, str]:
    folder = Path(word).expanduser()
    return {"folder": str(folder.resolve())} if folder.is_dir() else {"hub": word}


def described_drafter(
    word: str, method: str | None, form: str | None, depth: int | None
) -> tuple[str, dict[str, Any]]:
    """A folder tells its own method, format and depth; of what is on the hub, the options tell."""
    where = place(word)
    if "folder" in where:
        from peagle.drafter.formats.checkpoint import read

        found = read(Path(where["folder"]))
        for told, true, option in (
            (method, found.config.method, "--method"),
            (form, found.format, "--format"),
        ):
            if told not in (None, true):
                raise UserError(f"{word} holds {true}, not {told}: drop {option}")
        method, form, depth = found.config.method, found.format, depth or found.config.k_trained
    return method or "p-eagle", given(where | {"format": form, "depth": depth})


def resolved(entry: dict[str, Any], root: Path) -> dict[str, Any]:
    """Folders by their full path: the file moves to the config folder, they do not."""
    if not isinstance(entry, dict):
        return entry
    return {
        key: str(root / Path(value).expanduser())
        if key == "folder" and isinstance(value, str)
        else resolved(value, root)
        for key, value in entry.items()
    }
