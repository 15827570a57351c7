"""The catalogue: pair names to pairs. The shipped entries are data, in catalog.toml."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from peagle.core import DrafterSource, Pair, TargetSource, Wheels, parse_method
from peagle.errors import UserError, nearest

DEFAULT_PAIR = "smollm2-135m"
HERE = Path(__file__).parent


@cache
def catalog() -> dict[str, Pair]:
    entries = tomllib.loads((HERE / "catalog.toml").read_text())
    return {name: _pair(name, entry) for name, entry in entries.items()}


def find(name: str) -> Pair:
    """The pair of that name or hub id, or a pair made of a local folder that holds a target."""
    pairs = catalog()
    for pair in pairs.values():
        if name in (pair.name, pair.target.hub):
            return pair
    if (Path(name).expanduser() / "config.json").is_file():
        return Pair(name, TargetSource(order=("folder",), folder=Path(name).expanduser()), drafters={})
    raise UserError(
        f"unknown pair {name!r}: use one of {', '.join(pairs)}, or the path of a folder with a target"
        f" (config.json, safetensors, tokenizer).{nearest(name, list(pairs))}"
    )


def _pair(name: str, entry: dict[str, Any]) -> Pair:
    target = dict(entry["target"])
    order = tuple(target.pop("sources"))
    wheels = target.pop("wheels", None)
    folder = target.pop("folder", None)
    return Pair(
        name=name,
        target=TargetSource(
            order=order,
            wheels=_wheels(**wheels) if wheels else None,
            folder=Path(folder).expanduser() if folder else None,
            **target,
        ),
        drafters={parse_method(method): _drafter(d) for method, d in entry["drafters"].items()},
        method=parse_method(entry["method"]),
        k=entry["k"],
        license=entry["license"],
    )


def _wheels(packages: Any, members: Any, bytes: int, sha256: str, parts: int | None = None) -> Wheels:
    """`packages` and `members` are lists, or with `parts` a pattern in {i} = 1..parts."""
    if parts:
        packages = [packages.format(i=i) for i in range(1, parts + 1)]
        members = [members.format(i=i) for i in range(1, parts + 1)]
    return Wheels(tuple(packages), tuple(members), bytes, sha256)


def _drafter(entry: dict[str, Any]) -> DrafterSource:
    entry = dict(entry)
    folder = entry.pop("folder", None)
    ids = entry.pop("aux_layer_ids", None)
    return DrafterSource(folder=HERE / folder if folder else None, aux_layer_ids=tuple(ids) if ids else None, **entry)
