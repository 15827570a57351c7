"""The catalog: pair names to pairs. The shipped entries are data, in catalog.toml; a user's own lie in their config
folder, pairs/NAME.toml, one entry a file."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from peagle.catalog.entry import HUB, parse_pair
from peagle.catalog.pair import Pair, TargetSource
from peagle.errors import UserError, nearest
from peagle.paths import config_home

DEFAULT_PAIR = "smollm2-135m"
PACKAGE = Path(__file__).parents[1]  # folders in catalog.toml are relative to it


@cache
def shipped() -> dict[str, Pair]:
    entries = read_toml(Path(__file__).with_name("catalog.toml"))
    return {
        name: parse_pair(name, entry, PACKAGE, f"catalog.toml: [{name}]")
        for name, entry in entries.items()
    }


def user_files() -> dict[str, Path]:
    """A user's own pairs, unread, by name."""
    return {path.stem: path for path in sorted((config_home() / "pairs").glob("*.toml"))}


def names() -> list[str]:
    return list(dict.fromkeys([*shipped(), *user_files()]))


def catalog() -> dict[str, Pair]:
    """Every pair; a user's file that cannot be read is an error that names it."""
    return shipped() | {path.stem: read_pair(path) for path in user_files().values()}


def read_pair(path: Path) -> Pair:
    """A user's pair: the file's name is the pair's, relative folders begin beside it."""
    if path.stem in shipped():
        raise UserError(f"{path}: {path.stem!r} is a pair of peagle's own: rename the file")
    return parse_pair(path.stem, read_toml(path), path.resolve().parent, str(path))


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise UserError(f"{path} is no TOML: {error}") from error


def find(name: str) -> Pair:
    """The pair of that name or hub id, or a target alone: in a local folder, or of any other hub id."""
    for pair in shipped().values():
        if name in (pair.name, pair.target.hub):
            return pair
    if name in (own := user_files()):
        return read_pair(own[name])
    if (Path(name).expanduser() / "config.json").is_file():
        return Pair(
            name, TargetSource(order=("folder",), folder=Path(name).expanduser()), drafters={}
        )
    for pair in catalog().values():
        if name == pair.target.hub:
            return pair
    if HUB.fullmatch(name) and not Path(name).exists():
        return Pair(name.replace("/", "--"), TargetSource(order=("hub",), hub=name), drafters={})
    raise UserError(
        f"unknown pair {name!r}: use one of {', '.join(names())}, a hub id OWNER/NAME, or the path of a folder with a"
        f" target (config.json, safetensors, tokenizer).{nearest(name, names())}"
    )
