"""Small grammars for which llguidance does not terminate, or runs out of memory or stack."""

from typing import Any

from peagle.grammar import Grammar

MULTIPLE = {"type": "integer", "multipleOf": 10_000_019}
LEVELS = 4000


def nested_references(levels: int = LEVELS) -> dict[str, Any]:
    """A schema whose compilation overflows a stack of 8 MB."""
    definitions: dict[str, Any] = {
        f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(levels)
    }
    definitions[f"a{levels}"] = {"type": "integer"}
    return {"$ref": "#/$defs/a0", "$defs": definitions}


# No check of single numbers rejects these, only one of their product.
PRODUCT = {
    "type": "array",
    "items": {"anyOf": [{"type": "integer", "multipleOf": p} for p in (9941, 9949, 9967, 9973)]},
}
RULES = 'start: %json {"type": "integer", "multipleOf": 10000019}'
OPTIONAL = "a?" * 20_000
MEMORY = "([a-z]|[0-9])?" * 9000

# Each grammar with a part of the reason why the probe refuses it.
PROBE_BOMBS: dict[str, tuple[Grammar, str]] = {
    "rules": (Grammar.ebnf(RULES), "seconds|MB of memory"),
    "references": (Grammar.json(nested_references()), "nested too deeply"),
}
# As fields of a request, each with a part of the answer.
REQUEST_BOMBS: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": MULTIPLE}, "multipleOf 10000019"),
    ({"guided_json": nested_references()}, "nested too deeply"),
    ({"guided_json": PRODUCT}, "seconds|MB of memory"),
    ({"guided_grammar": RULES}, "seconds|MB of memory"),
    ({"guided_regex": OPTIONAL}, "seconds|MB of memory"),
    ({"guided_regex": MEMORY}, "seconds|MB of memory"),
]
