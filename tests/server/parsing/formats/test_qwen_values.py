"""The types of Qwen3-Coder's values, from the tool's schema."""

from typing import Any

from peagle.server.parsing.formats.qwen_values import allowed_types


def test_schemas_that_refer_to_themselves() -> None:
    """A schema counts once: ten references to itself would take 10**17 steps."""
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}] * 10 + [{"type": "string"}]}
    root: dict[str, Any] = {"$defs": {"loop": loop}}
    assert allowed_types({"$ref": "#/$defs/loop"}, root) == {"string"}
    pair = {"anyOf": [{"$ref": "#/$defs/name"}, {"$ref": "#/$defs/name"}, {"type": "null"}]}
    root = {"$defs": {"name": {"type": "string"}}}
    assert allowed_types(pair, root) == {"string", "null"}
