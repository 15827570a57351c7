from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from peagle.catalog.catalog import (
    is_gguf_file,
    read_toml,
    require_file,
    shipped_pairs,
    user_files,
)
from peagle.catalog.entry import parse_pair
from peagle.cli.options import K
from peagle.cli.options import Method as MethodOption
from peagle.cli.pairs.catalog import catalog_app
from peagle.errors import UserError
from peagle.paths import config_home, write_text


def optional(option: str, help: str) -> Any:
    return typer.Option(option, help=help, show_default=False)


@dataclass(frozen=True, slots=True)
class PairOptions:
    """The options that describe a pair."""

    target: str | None
    drafter: str | None
    method: str | None
    k: int | None
    format: str | None
    depth: int | None
    vllm: str | None
    context: int | None
    license: str | None


@catalog_app.command()
def add(
    name: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="Name of the pair, or a file NAME.toml.")
    ],
    target: Annotated[
        str | None, optional("--target", "A hub id, a folder or a .gguf file.")
    ] = None,
    drafter: Annotated[str | None, optional("--drafter", "A hub id or a folder.")] = None,
    method: MethodOption = None,
    k: K = None,
    format: Annotated[
        str | None, optional("--format", "Format of the drafter: peagle, vllm or speculators.")
    ] = None,
    depth: Annotated[int | None, optional("--depth", "K in the drafter's training.")] = None,
    vllm: Annotated[
        str | None, optional("--vllm", "First version of vLLM that serves the pair, like 0.18.")
    ] = None,
    context: Annotated[
        int | None, optional("--context", "Maximum number of tokens of a request.")
    ] = None,
    license: Annotated[str | None, optional("--license", "License of the target.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a pair of yours with that name.")
    ] = False,
) -> None:
    """Add a pair to your config folder, for every command that takes PAIR.

    Example: peagle catalog add mine --target Qwen/Qwen3-0.6B --drafter trained/ -k 5
    """
    options = PairOptions(target, drafter, method, k, format, depth, vllm, context, license)
    if name.endswith(".toml"):
        path = Path(name).expanduser()
        save_entry(path.stem, entry_from_file(path, options), force)
    else:
        save_entry(name, entry_from_options(options), force)


def entry_from_file(path: Path, options: PairOptions) -> dict[str, Any]:
    if any(getattr(options, name) is not None for name in PairOptions.__slots__):
        raise UserError(
            f"{path} describes the whole pair: leave the other options out,"
            " or give a name instead of the file"
        )
    return drop_unset(resolve_folders(read_toml(path), path.resolve().parent))


def entry_from_options(options: PairOptions) -> dict[str, Any]:
    if options.target is None:
        raise UserError("a pair needs a target: give --target HUB_ID, DIR or FILE.gguf")
    entry: dict[str, Any] = {
        "license": options.license,
        "method": options.method,
        "k": options.k,
        "target": locate_target(options.target),
        "production": drop_unset({"vllm": options.vllm, "context": options.context}),
    }
    if options.drafter is not None:
        method, drafter = describe_drafter(options.drafter, options)
        entry |= {"method": method, "drafters": {method: drafter}}
    elif options.method is None:
        entry["method"] = "none"
    return drop_unset(entry)


def save_entry(name: str, entry: dict[str, Any], force: bool) -> None:
    import tomli_w

    if name in shipped_pairs():
        raise UserError(f"{name!r} is a shipped pair: choose another name")
    if name in user_files() and not force:
        raise UserError(f"you have a pair {name!r} already: --force replaces it")
    path = config_home() / "pairs" / f"{name}.toml"
    parse_pair(name, entry, path.parent, name)
    write_text(path, tomli_w.dumps(entry))
    print(f"{name}: {path}")


def drop_unset(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if value not in (None, {})}


def locate(text: str) -> dict[str, str]:
    """The `folder` or `hub` field of an entry."""
    folder = Path(text).expanduser()
    return {"folder": str(folder.resolve())} if folder.is_dir() else {"hub": text}


def locate_target(text: str) -> dict[str, str]:
    """As `locate`, also for a GGUF file."""
    path = Path(text).expanduser()
    require_file(path)
    return {"folder": str(path.resolve())} if is_gguf_file(path) else locate(text)


def describe_drafter(text: str, options: PairOptions) -> tuple[str, dict[str, Any]]:
    """The method and the entry of a drafter.

    A folder has its own method, format and depth; for a hub id, the options give them.
    """
    location = locate(text)
    method = options.method
    format = options.format
    depth = options.depth
    if "folder" in location:
        from peagle.drafter.formats.checkpoint import read

        checkpoint = read(Path(location["folder"]))
        require_equal(text, method, checkpoint.config.method, "--method")
        require_equal(text, format, checkpoint.format, "--format")
        method = checkpoint.config.method
        format = checkpoint.format
        depth = depth or checkpoint.config.k_trained
    return method or "p-eagle", drop_unset(location | {"format": format, "depth": depth})


def require_equal(drafter: str, given: str | None, actual: str, option: str) -> None:
    if given not in (None, actual):
        raise UserError(f"{drafter} is {actual}, not {given}: drop {option}")


def resolve_folders(entry: Any, root: Path) -> Any:
    """Make folders absolute: the file moves to the config folder, they do not."""
    if not isinstance(entry, dict):
        return entry
    return {
        key: str(root / Path(value).expanduser())
        if key == "folder" and isinstance(value, str)
        else resolve_folders(value, root)
        for key, value in entry.items()
    }
