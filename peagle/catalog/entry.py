"""Parse one entry of a catalog from TOML to a Pair, and check that its fields agree."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peagle.catalog.fields import (
    DRAFTER_FIELDS,
    MEMORY_FIELDS,
    PAIR_FIELDS,
    PRODUCTION_FIELDS,
    TARGET_FIELDS,
    UNKNOWN,
    WHEELS_FIELDS,
    read_fields,
)
from peagle.catalog.pair import DrafterSource, Pair, TargetSource, Wheels
from peagle.catalog.production import Memory, Production
from peagle.core import CHECKPOINT_FORMATS, DRAFTER_METHODS, Method, parse_method
from peagle.errors import UserError, did_you_mean

PAIR_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # OWNER/NAME
VLLM_VERSION = re.compile(r"\d+\.\d+(\.\d+)?")
INSTANCE_TYPE = re.compile(r"ml\.[a-z0-9-]+\.[a-z0-9]+")
FLAG_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")
# vLLM options that `peagle deploy` sets
RESERVED_FLAGS = (
    "model",
    "host",
    "port",
    "speculative-config",
    "max-model-len",
    "tensor-parallel-size",
    "served-model-name",
    "api-key",
)


def parse_pair(name: str, entry: Mapping[str, Any], root: Path, source: str) -> Pair:
    """Parse an entry. Folders are relative to `root`; `source` is its location, for messages."""
    if not PAIR_NAME.fullmatch(name):
        raise UserError(
            f"{source}: {name!r} is not a valid name of a pair:"
            " use a-z, 0-9, dot and dash, at most 63 characters"
        )
    values = read_fields(entry, PAIR_FIELDS, source)
    if "target" not in values:
        raise UserError(
            f'{source}: [target] is missing: add it with hub = "ORG/NAME" or folder = "DIR"'
        )
    drafters = parse_drafters(values.get("drafters", {}), root, source)
    method = parse_entry_method(values.get("method", next(iter(drafters), "none")), source)
    if method in DRAFTER_METHODS and method not in drafters:
        raise UserError(
            f"{source}: method is {method!r}, but there is no [drafters.{method}]: add it"
        )
    pair = Pair(
        name=name,
        target=parse_target(values["target"], root, f"{source}: [target]"),
        drafters=drafters,
        method=method,
        license=values.get("license", UNKNOWN),
        production=parse_production(values.get("production", {}), f"{source}: [production]"),
        **{"k": values["k"]} if "k" in values else {},
    )
    check_depth(pair, source)
    return pair


def parse_drafters(table: Any, root: Path, source: str) -> dict[Method, DrafterSource]:
    entries = read_fields(table, dict.fromkeys(DRAFTER_METHODS, dict), f"{source}: [drafters]")
    return {
        parse_entry_method(name, source): parse_drafter(entry, root, f"{source}: [drafters.{name}]")
        for name, entry in entries.items()
    }


def parse_entry_method(text: str, source: str) -> Method:
    try:
        return parse_method(text)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error


def parse_target(entry: Any, root: Path, location: str) -> TargetSource:
    values = read_fields(entry, TARGET_FIELDS, location)
    available = [source for source in ("folder", "wheels", "hub") if source in values]
    order = tuple(values.pop("sources", available))
    if not available or not order:
        raise UserError(
            f'{location} has no source of the target: add hub = "ORG/NAME" or folder = "DIR"'
        )
    if missing := [source for source in order if source not in available]:
        raise UserError(
            f"{location}: sources names {missing[0]!r},"
            f" but the target has only {', '.join(available)}"
        )
    check_hub_ids(values, location)
    if "wheels" in values:
        values["wheels"] = parse_wheels(values["wheels"], location)
    resolve_folder(values, root)
    return TargetSource(order=order, **values)


def parse_wheels(table: Any, location: str) -> Wheels:
    """`packages` and `members` are lists, or with `parts` patterns of {i} = 1..parts."""
    values = read_fields(table, WHEELS_FIELDS, location)
    if missing := [key for key in ("packages", "members", "bytes", "sha256") if key not in values]:
        raise UserError(
            f"{location}: wheels need {missing[0]}: only size and checksum identify the file"
        )
    packages = values["packages"]
    members = values["members"]
    if "parts" in values:
        numbers = range(1, values["parts"] + 1)
        packages = [packages.format(i=i) for i in numbers]
        members = [members.format(i=i) for i in numbers]
    return Wheels(tuple(packages), tuple(members), values["bytes"], values["sha256"])


def parse_drafter(entry: Any, root: Path, location: str) -> DrafterSource:
    values = read_fields(entry, DRAFTER_FIELDS, location)
    check_hub_ids(values, location)
    format = values.get("format")
    if format not in (None, *CHECKPOINT_FORMATS):
        known: list[str] = list(CHECKPOINT_FORMATS)
        close = did_you_mean(str(format), known)
        raise UserError(f"{location}: unknown format {format!r}: use {', '.join(known)}.{close}")
    if "aux_layer_ids" in values:
        values["aux_layer_ids"] = tuple(values["aux_layer_ids"])
    resolve_folder(values, root)
    return DrafterSource(**values)


def resolve_folder(values: dict[str, Any], root: Path) -> None:
    if "folder" in values:
        values["folder"] = root / Path(values["folder"]).expanduser()


def check_hub_ids(values: Mapping[str, Any], location: str) -> None:
    for key in ("hub", "long_context"):
        if key in values and not HUB_ID.fullmatch(values[key]):
            raise UserError(f"{location}: {key} is {values[key]!r}, but a hub id is ORG/NAME")


def parse_production(entry: Any, location: str) -> Production:
    values = read_fields(entry, PRODUCTION_FIELDS, location)
    if not VLLM_VERSION.fullmatch(values.get("vllm", "0.0")):
        raise UserError(
            f'{location}: vllm is {values["vllm"]!r}, but must be the first version, like "0.18"'
        )
    check_flags(values.get("flags", {}), location)
    for instance in values.get("instances", ()):
        if not INSTANCE_TYPE.fullmatch(str(instance)):
            raise UserError(
                f"{location}: instances has {instance!r}, but a type is like ml.g7e.2xlarge"
            )
    if "instances" in values:
        values["instances"] = tuple(values["instances"])
    if "k" in values:
        values["k"] = parse_k_by_concurrency(values["k"], location)
    if "memory" in values:
        values["memory"] = parse_memory(values["memory"], f"{location[:-1]}.memory]")
    return Production(**values)


def check_flags(flags: Mapping[str, Any], location: str) -> None:
    """Names and values become command lines and YAML: neither may begin a new line there."""
    for flag, value in flags.items():
        if flag in RESERVED_FLAGS or flag.startswith("-"):
            raise UserError(
                f"{location}: flags cannot have {flag!r}: leave the dashes out,"
                " and options that `peagle deploy` sets"
            )
        if not FLAG_NAME.fullmatch(flag):
            raise UserError(
                f"{location}: flags has {flag!r}, but the name of an option consists of letters,"
                " digits, dashes, dots and _"
            )
        if isinstance(value, str) and not value.isprintable():
            raise UserError(
                f"{location}: {flag} is {value!r}, which contains line breaks or control"
                " characters: write it on one line, or give the path of a file"
            )
        if value is False or isinstance(value, list):
            raise UserError(
                f"{location}: {flag} is {value}, but a flag is true, a text, a number or a table"
            )


def parse_k_by_concurrency(table: Mapping[str, Any], location: str) -> dict[int, int]:
    k_by_concurrency = {}
    for concurrency, k in table.items():
        if not concurrency.isdecimal() or int(concurrency) < 1 or type(k) is not int or k < 1:
            raise UserError(
                f"{location}: k must be like {{ 1 = 7, 8 = 3 }}: concurrency = K from there on"
            )
        k_by_concurrency[int(concurrency)] = k
    return dict(sorted(k_by_concurrency.items()))


def parse_memory(entry: Any, location: str) -> Memory:
    values = read_fields(entry, MEMORY_FIELDS, location)
    sizes = [values[key] for key in ("layers", "kv_heads", "head_dim") if key in values]
    position = 2 * math.prod(sizes) * 2 if len(sizes) == 3 else None  # keys and values, 2 bytes
    return Memory(values.get("weights"), position, values.get("drafter"), values.get("source", ""))


def check_depth(pair: Pair, source: str) -> None:
    """Refuse a K beyond the depth in the drafter's training."""
    depth = pair.drafters[pair.method].depth if pair.method in DRAFTER_METHODS else None
    for k in (pair.k, *pair.production.k.values()):
        if depth is not None and k > depth:
            raise UserError(
                f"{source}: K is {k}, but the drafter was trained to depth {depth}:"
                f" use {depth} or less"
            )
