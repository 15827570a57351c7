"""One entry of a catalog, from TOML to a Pair: every field known, of its kind, and in accord with the others."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peagle.catalog.pair import DrafterSource, Pair, TargetSource, Wheels
from peagle.catalog.production import Memory, Production
from peagle.core import FORMATS, METHODS, Method
from peagle.errors import UserError, nearest

UNKNOWN = "unknown"
NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")
HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # OWNER/NAME

PAIR = {
    "license": str,
    "method": str,
    "k": int,
    "target": dict,
    "drafters": dict,
    "production": dict,
}
TARGET = {
    "sources": list,
    "hub": str,
    "revision": str,
    "folder": str,
    "wheels": dict,
    "digits_split": bool,
}
WHEELS = {
    "packages": (str, list),
    "members": (str, list),
    "parts": int,
    "bytes": int,
    "sha256": str,
}
DRAFTER = {
    "folder": str,
    "hub": str,
    "revision": str,
    "long_context": str,
    "format": str,
    "depth": int,
    "layers": int,
    "aux_layer_ids": list,
    "mask_token_id": int,
    "seed": int,
}
PRODUCTION = {
    "vllm": str,
    "context": int,
    "k": dict,
    "flags": dict,
    "memory": dict,
    "instances": list,
    "jumpstart_id": str,
    "jumpstart_k": int,
    "channel": str,
}
MEMORY = {
    "weights": int,
    "layers": int,
    "kv_heads": int,
    "head_dim": int,
    "drafter": int,
    "source": str,
}
OURS = (
    "model",
    "host",
    "port",
    "speculative-config",
    "max-model-len",
    "tensor-parallel-size",
    "served-model-name",
    "api-key",
)
KINDS = {
    str: "a text",
    int: "a whole number",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}


def parse_pair(name: str, entry: Mapping[str, Any], root: Path, source: str) -> Pair:
    """`root`: what relative folders begin at. `source`: where the entry stands, for the user's eyes."""
    if not NAME.fullmatch(name):
        raise UserError(
            f"{source}: {name!r} is no pair's name: use a-z, 0-9, dot and dash, at most 63 of them"
        )
    given = fields(entry, PAIR, source)
    if "target" not in given:
        raise UserError(
            f'{source}: [target] is missing: add one with hub = "ORG/NAME" or folder = "DIR"'
        )
    parts = fields(given.get("drafters", {}), dict.fromkeys(METHODS, dict), f"{source}: [drafters]")
    drafters = {
        method_of(word, source): drafter_of(sub, root, f"{source}: [drafters.{word}]")
        for word, sub in parts.items()
    }
    method = method_of(given.get("method", next(iter(drafters), "none")), source)
    if method != "none" and method not in drafters:
        raise UserError(
            f"{source}: method is {method!r}, but there is no [drafters.{method}]: add it"
        )
    pair = Pair(
        name=name,
        target=target_of(given["target"], root, f"{source}: [target]"),
        drafters=drafters,
        method=method,
        license=given.get("license", UNKNOWN),
        production=production_of(given.get("production", {}), f"{source}: [production]"),
        **{"k": given["k"]} if "k" in given else {},
    )
    check_depth(pair, source)
    return pair


def fields(given: Any, known: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What was given, without what is unknown: every key a known one, every value of its kind."""
    if not isinstance(given, Mapping):
        raise UserError(f"{where} must be a table, not {given!r}")
    for key, value in given.items():
        if key not in known:
            raise UserError(
                f"{where} has an unknown field {key!r}: use {', '.join(known)}.{nearest(key, list(known))}"
            )
        kinds = known[key] if isinstance(known[key], tuple) else (known[key],)
        if value != UNKNOWN and type(value) not in kinds:
            raise UserError(
                f"{where}: {key} must be {' or '.join(KINDS[kind] for kind in kinds)}, not {value!r}"
            )
        if (
            type(value) is int
            and int in kinds
            and value < (0 if key in ("mask_token_id", "seed") else 1)
        ):
            raise UserError(f"{where}: {key} is {value}, but must be 1 or more")
    return {key: value for key, value in given.items() if value != UNKNOWN}


def method_of(word: str, source: str) -> Method:
    if word not in METHODS:
        raise UserError(
            f"{source}: unknown method {word!r}: use {', '.join(METHODS)}.{nearest(word, list(METHODS))}"
        )
    return word


def target_of(entry: Any, root: Path, where: str) -> TargetSource:
    given = fields(entry, TARGET, where)
    has = [source for source in ("folder", "wheels", "hub") if source in given]
    order = tuple(given.pop("sources", has))
    if not has or not order:
        raise UserError(
            f'{where} says not where the target comes from: add hub = "ORG/NAME" or folder = "DIR"'
        )
    if strange := [source for source in order if source not in has]:
        raise UserError(
            f"{where}: sources names {strange[0]!r}, but the target has only {', '.join(has)}"
        )
    check_hub(given, where)
    if "wheels" in given:
        given["wheels"] = wheels_of(fields(given["wheels"], WHEELS, where), where)
    return TargetSource(order=order, **given | folder_of(given, root))


def wheels_of(given: dict[str, Any], where: str) -> Wheels:
    """`packages` and `members` are lists, or with `parts` a pattern in {i} = 1..parts."""
    if missing := [key for key in ("packages", "members", "bytes", "sha256") if key not in given]:
        raise UserError(
            f"{where}: wheels need {missing[0]}: only size and checksum make them trustworthy"
        )
    packages, members = given["packages"], given["members"]
    if "parts" in given:
        numbers = range(1, given["parts"] + 1)
        packages, members = (
            [packages.format(i=i) for i in numbers],
            [members.format(i=i) for i in numbers],
        )
    return Wheels(tuple(packages), tuple(members), given["bytes"], given["sha256"])


def drafter_of(entry: Any, root: Path, where: str) -> DrafterSource:
    given = fields(entry, DRAFTER, where)
    check_hub(given, where)
    if given.get("format", FORMATS[0]) not in FORMATS:
        close = nearest(given["format"], list(FORMATS))
        raise UserError(
            f"{where}: unknown format {given['format']!r}: use {', '.join(FORMATS)}.{close}"
        )
    if "aux_layer_ids" in given:
        given["aux_layer_ids"] = tuple(given["aux_layer_ids"])
    return DrafterSource(**given | folder_of(given, root))


def folder_of(given: Mapping[str, Any], root: Path) -> dict[str, Path]:
    return {"folder": root / Path(given["folder"]).expanduser()} if "folder" in given else {}


def check_hub(given: Mapping[str, Any], where: str) -> None:
    for key in ("hub", "long_context"):
        if key in given and not HUB.fullmatch(given[key]):
            raise UserError(f"{where}: {key} is {given[key]!r}, but a hub id is ORG/NAME")


def production_of(entry: Any, where: str) -> Production:
    given = fields(entry, PRODUCTION, where)
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", given.get("vllm", "0.0")):
        raise UserError(
            f'{where}: vllm is {given["vllm"]!r}, but the first version is wanted, like "0.18"'
        )
    for flag, value in given.get("flags", {}).items():
        if flag in OURS or flag.startswith("-"):
            raise UserError(
                f"{where}: flags cannot hold {flag!r}: leave the dashes out, and what `peagle deploy` sets"
            )
        if value is False or isinstance(value, list):
            raise UserError(
                f"{where}: {flag} is {value}, but a flag is true, a text, a number or a table"
            )
    for instance in given.get("instances", ()):
        if not re.fullmatch(r"ml\.[a-z0-9-]+\.[a-z0-9]+", str(instance)):
            raise UserError(
                f"{where}: instances holds {instance!r}, but a type is like ml.g7e.2xlarge"
            )
    if "instances" in given:
        given["instances"] = tuple(given["instances"])
    if "k" in given:
        given["k"] = by_concurrency(given["k"], where)
    if "memory" in given:
        given["memory"] = memory_of(given["memory"], f"{where[:-1]}.memory]")
    return Production(**given)


def by_concurrency(given: Mapping[str, Any], where: str) -> dict[int, int]:
    found = {}
    for concurrency, k in given.items():
        if not concurrency.isdecimal() or int(concurrency) < 1 or type(k) is not int or k < 1:
            raise UserError(
                f"{where}: k must be like {{ 1 = 7, 8 = 3 }}: K from each concurrency on"
            )
        found[int(concurrency)] = k
    return dict(sorted(found.items()))


def memory_of(entry: Any, where: str) -> Memory:
    given = fields(entry, MEMORY, where)
    sizes = [given[key] for key in ("layers", "kv_heads", "head_dim") if key in given]
    position = 2 * math.prod(sizes) * 2 if len(sizes) == 3 else None
    return Memory(given.get("weights"), position, given.get("drafter"), given.get("source", ""))


def check_depth(pair: Pair, source: str) -> None:
    """No K beyond what the drafter was trained for."""
    depth = pair.drafters[pair.method].depth if pair.method != "none" else None
    for k in (pair.k, *pair.production.k.values()):
        if depth is not None and k > depth:
            raise UserError(
                f"{source}: K is {k}, but the drafter was trained to depth {depth}: use {depth} or less"
            )
