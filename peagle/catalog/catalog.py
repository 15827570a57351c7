"""The catalog: pair names -> pairs.

The shipped entries are in catalog.toml. Each pair of the user has a file pairs/NAME.toml in the
config folder.
"""

import os
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from peagle.catalog.entry import HUB_ID, parse_pair
from peagle.catalog.pair import Pair, TargetSource
from peagle.errors import UserError, did_you_mean
from peagle.paths import config_home

DEFAULT_PAIR = "smollm2-135m"
PACKAGE = Path(__file__).parents[1]  # folders in catalog.toml are relative to it


@cache
def shipped_pairs() -> dict[str, Pair]:
    entries = read_toml(Path(__file__).with_name("catalog.toml"))
    return {
        name: parse_pair(name, entry, PACKAGE, f"catalog.toml: [{name}]")
        for name, entry in entries.items()
    }


def user_files() -> dict[str, Path]:
    """Name -> file of each pair of the user."""
    return {path.stem: path for path in sorted((config_home() / "pairs").glob("*.toml"))}


def pair_names() -> list[str]:
    return list(dict.fromkeys([*shipped_pairs(), *user_files()]))


def all_pairs() -> dict[str, Pair]:
    """All pairs. A file of the user that cannot be read raises an error with its path."""
    return shipped_pairs() | {path.stem: read_pair(path) for path in user_files().values()}


def read_pair(path: Path) -> Pair:
    """Read a pair of the user. Its name is the file name; folders are relative to the file."""
    if path.stem in shipped_pairs():
        raise UserError(f"{path}: {path.stem!r} is a shipped pair: rename the file")
    return parse_pair(path.stem, read_toml(path), path.resolve().parent, str(path))


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise UserError(f"{path} is not valid TOML ({error}): correct it") from error


def is_gguf_name(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def is_gguf_file(path: Path) -> bool:
    return is_gguf_name(path) and os.path.isfile(path)  # False also for a name that is too long


def require_file(path: Path) -> None:
    """Raise if `path` is the name of a GGUF file, and there is no such file."""
    if is_gguf_name(path) and not path.is_file():
        raise UserError(f"there is no file {path}: give the path of a .gguf file")


def is_path(name: str) -> bool:
    """Whether `name` can only be a path: a relative one may look like a hub id or a name."""
    return name.startswith(("/", "./", "../", "~"))


def find_pair(name: str) -> Pair:
    """Find a pair by its name or the hub id of its target.

    The path of a folder or a GGUF file and any other hub id give a pair without drafters.
    """
    for pair in shipped_pairs().values():
        if name in (pair.name, pair.target.hub):
            return pair
    if name in (own := user_files()):
        return read_pair(own[name])
    folder = Path(os.path.expanduser(name))  # Without an error for an unknown user.
    if (folder / "config.json").is_file() or is_gguf_file(folder):
        return Pair(name, TargetSource(order=("folder",), folder=folder), drafters={})
    for pair in all_pairs().values():
        if name == pair.target.hub:
            return pair
    require_file(folder)  # before hub ids, which may look the same
    if HUB_ID.fullmatch(name) and not Path(name).exists():
        return Pair(name.replace("/", "--"), TargetSource(order=("hub",), hub=name), drafters={})
    if is_path(name) and not os.path.exists(folder):
        raise UserError(f"there is no folder {folder}: give one that exists, or a pair's name")
    names = pair_names()
    raise UserError(
        f"unknown pair {name!r}: use one of {', '.join(names)}, a hub id OWNER/NAME, or the path"
        " of a folder with a target (config.json, safetensors, tokenizer) or of a .gguf file."
        f"{did_you_mean(name, names)}"
    )
