"""The fields of a catalog entry: the names and types in each table, and how they are read."""

from collections.abc import Mapping
from typing import Any

from peagle.errors import UserError, did_you_mean

UNKNOWN = "unknown"  # allowed as the value of every field, same as leaving it out
Fields = Mapping[str, type | tuple[type, ...]]

PAIR_FIELDS: Fields = {
    "license": str,
    "method": str,
    "k": int,
    "target": dict,
    "drafters": dict,
    "production": dict,
}
TARGET_FIELDS: Fields = {
    "sources": list,
    "hub": str,
    "revision": str,
    "folder": str,
    "wheels": dict,
    "digits_split": bool,
}
WHEELS_FIELDS: Fields = {
    "packages": (str, list),
    "members": (str, list),
    "parts": int,
    "bytes": int,
    "sha256": str,
}
DRAFTER_FIELDS: Fields = {
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
PRODUCTION_FIELDS: Fields = {
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
MEMORY_FIELDS: Fields = {
    "weights": int,
    "layers": int,
    "kv_heads": int,
    "head_dim": int,
    "drafter": int,
    "source": str,
}
MAY_BE_ZERO = ("mask_token_id", "seed")
TYPE_NAMES = {
    str: "a text",
    int: "a whole number",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}


def read_fields(table: Any, fields: Fields, location: str) -> dict[str, Any]:
    """Check names, types and the least value of numbers; return the fields that are not unknown.

    `location` is the file and the table, for messages.
    """
    if not isinstance(table, Mapping):
        raise UserError(f"{location} must be a table, not {table!r}")
    for key, value in table.items():
        if key not in fields:
            close = did_you_mean(key, list(fields))
            raise UserError(
                f"{location} has an unknown field {key!r}: use {', '.join(fields)}.{close}"
            )
        if value != UNKNOWN:
            _check_value(key, value, fields[key], location)
    return {key: value for key, value in table.items() if value != UNKNOWN}


def _check_value(key: str, value: Any, types: type | tuple[type, ...], location: str) -> None:
    types = types if isinstance(types, tuple) else (types,)
    if type(value) not in types:
        expected = " or ".join(TYPE_NAMES[type_] for type_ in types)
        raise UserError(f"{location}: {key} must be {expected}, not {value!r}")
    if type(value) is int and value < (0 if key in MAY_BE_ZERO else 1):
        raise UserError(f"{location}: {key} is {value}, but must be 1 or more")
