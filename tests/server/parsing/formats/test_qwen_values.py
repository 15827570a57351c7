"""Types and patterns of parameter values of Qwen3-Coder, from the schema of a tool."""

import time
from typing import Any

from peagle.server.parsing.formats.qwen_grammar import alternatives
from peagle.server.parsing.formats.qwen_values import allowed_types


def test_schemas_that_refer_to_themselves() -> None:
    """Each schema is visited once: ten references to itself would otherwise take 10**17 steps."""
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}] * 10 + [{"type": "string"}]}
    root: dict[str, Any] = {"$defs": {"loop": loop}}
    assert allowed_types({"$ref": "#/$defs/loop"}, root) == {"string"}
    pair = {"anyOf": [{"$ref": "#/$defs/name"}, {"$ref": "#/$defs/name"}, {"type": "null"}]}
    root = {"$defs": {"name": {"type": "string"}}}
    assert allowed_types(pair, root) == {"string", "null"}


def test_alternatives_of_a_pattern() -> None:
    assert alternatives(r"a|b(c|d)|\|e|[|]|") == ["a", "b(c|d)", r"\|e", "[|]", ""]
    started = time.process_time()
    # This would take minutes if the text were copied for every character.
    alternatives("a" * 1_000_000)
    assert time.process_time() - started < 5
