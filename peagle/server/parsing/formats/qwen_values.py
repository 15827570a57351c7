"""ValueSchemas: which JSON the values of Qwen3-Coder's parameters become, by the tool's schema."""

import json
from typing import Any

from peagle.server.parsing.formats.json_scanner import JsonScanner

MAX_REFERENCES = 16
Types = frozenset[str] | None  # None: any type.
TYPE_NAMES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
# Python's words, which code models write too.
LITERALS = {"true": "boolean", "false": "boolean", "null": "null", "none": "null"}


class ValueSchemas:
    """The schemas of a tool's parameters; a parameter without one takes any value."""

    def __init__(self, parameters: dict[str, Any] | None) -> None:
        self._root = parameters if isinstance(parameters, dict) else {}
        self._types: dict[str, Types] = {}

    def is_string(self, key: str) -> bool:
        """Whether the value can only be a string, which is taken verbatim."""
        return self.types(key) == {"string"}

    def convert(self, key: str, text: str) -> str | None:
        """The JSON of a value with a type other than string; None: the text has none."""
        types = self.types(key)
        text = text.strip()
        word = LITERALS.get(text.lower())
        if word is not None and (types is None or word in types):
            return "null" if word == "null" else text.lower()
        kind = json_type(text)
        if kind is None:
            return None
        names = {kind, "number"} if kind == "integer" else {kind}
        return text if types is None or names & types else None

    def types(self, key: str) -> Types:
        if key not in self._types:
            properties = resolve(self._root, self._root).get("properties")
            schema = properties.get(key) if isinstance(properties, dict) else None
            self._types[key] = allowed_types(schema, self._root)
        return self._types[key]


def json_type(text: str) -> str | None:
    """The type of a JSON text; None: it is not JSON, or clients could not read it."""
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, float) and value.is_integer():
        return "integer"  # JSON schema: 1.0 is an integer.
    return TYPE_NAMES[type(value)]


def ends_in_string(text: str) -> bool:
    """Whether the text is the beginning of a JSON value, and ends in one of its strings."""
    scanner = JsonScanner()
    scanner.feed('{"value":' + text)
    return scanner.is_in_string


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def allowed_types(
    schema: Any, root: dict[str, Any], references: int = 0, seen: set[int] | None = None
) -> Types:
    """The types that values of a schema can have, as far as its usual keywords tell.

    `seen`: schemas that are already in the union. They add nothing to it, and schemas that refer
    to themselves would take exponential time.
    """
    if not isinstance(schema, dict) or references > MAX_REFERENCES:
        return None
    schema = resolve(schema, root)
    seen = set() if seen is None else seen
    if id(schema) in seen:
        return frozenset()
    seen.add(id(schema))
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(name for name in kind if isinstance(name, str))
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(TYPE_NAMES.get(type(value), "object") for value in values)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            parts = schema[keyword]
            return union([allowed_types(part, root, references + 1, seen) for part in parts])
    return None


def union(all_types: list[Types]) -> Types:
    names: frozenset[str] = frozenset()
    for types in all_types:
        if types is None:
            return None
        names |= types
    return names


def resolve(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """The schema that a reference within the tool's schema leads to."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        target: Any = root
        for key in reference[1:].split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            break
        schema = target
    return schema
