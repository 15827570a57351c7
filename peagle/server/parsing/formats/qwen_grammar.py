"""The grammar of Qwen3-Coder's calls: parameters in the order of the schema, optional ones if any.

Values that can only be strings are text; others are JSON. What applies to all parameters together
(`anyOf` beside `properties`, for example) cannot be expressed and is refused.
"""

from typing import Any

from peagle.errors import UserError
from peagle.server.parsing.formats.call_grammar import ANY_TEXT, BoundTool, json_value, quoted
from peagle.server.parsing.formats.qwen_values import allowed_types, resolve

VALUE_END = quoted("\n</parameter>\n")
RULES = (
    f"FREE_TEXT: /{ANY_TEXT}/ & ~/{ANY_TEXT}<\\/parameter>{ANY_TEXT}/",
    # Text and end tag are one terminal, because the lexer does not go back to where a tag began.
    f"TEXT_VALUE: FREE_TEXT {VALUE_END}",
    'any_parameter: "<parameter=" /[A-Za-z0-9_.-]{1,64}/ ">\\n" TEXT_VALUE',
)
REFUSED_KEYWORDS = (
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "minProperties",
    "maxProperties",
    "patternProperties",
    "propertyNames",
)


class QwenRules:
    """What stands between the tags of calls; `rules` are those that the bodies use."""

    def __init__(self) -> None:
        self.rules = list(RULES)

    def body(self, tool: BoundTool) -> str:
        """One function with its parameters, in Lark's notation."""
        schema = resolve(tool.schema, tool.schema)
        refuse_keywords(tool, schema)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise UserError(
                f"`parameters` of the tool {tool.name!r} need an object of `properties` and a list"
                " of those that are `required`"
            )
        parameters = []
        for key in dict.fromkeys([*properties, *map(str, required)]):
            optional = "" if key in required else "?"
            parameters.append(self._parameter(tool, key, properties.get(key)) + optional)
        if not parameters and schema.get("additionalProperties") is not False:
            parameters = ["any_parameter*"]
        head, tail = quoted(f"\n<function={tool.name}>\n"), quoted("</function>\n")
        return f"{head} {' '.join(parameters)} {tail}"

    def _parameter(self, tool: BoundTool, key: str, schema: Any) -> str:
        if not key or any(char in "<>\n" for char in key):
            raise UserError(
                f"the tool parser qwen-xml does not support the parameter {key!r} of"
                f" {tool.name!r}: use letters, digits and underscores"
            )
        head = quoted(f"<parameter={key}>\n")
        if allowed_types(schema, tool.schema) == {"string"}:
            return f"({head} {self._text_value(resolve(schema, tool.schema))})"
        # References lead to the root, which is the value's own schema here.
        shared = {key: tool.schema[key] for key in ("$defs", "definitions") if key in tool.schema}
        own = schema if isinstance(schema, dict) else {}
        value = json_value(own | shared, tool.lenient)
        return f"({head} {value} {VALUE_END})"

    def _text_value(self, schema: dict[str, Any]) -> str:
        """A string as text, with its end tag; its limits of length and its pattern hold."""
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list):
            texts = [quoted(choice) for choice in choices if isinstance(choice, str)]
            return f"({' | '.join(texts)}) {VALUE_END}"
        limits = ["FREE_TEXT"]
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if least or most != "":
            limits.append(f"/(?s:.){{{least},{most}}}/")
        if isinstance(schema.get("pattern"), str):
            limits.append(f"/{whole_pattern(schema['pattern'])}/")
        if len(limits) == 1:
            return "TEXT_VALUE"
        number = len(self.rules)
        self.rules.append(f"LIMITED_{number}: {' & '.join(limits)}")
        self.rules.append(f"VALUE_{number}: LIMITED_{number} {VALUE_END}")
        return f"VALUE_{number}"


def refuse_keywords(tool: BoundTool, schema: dict[str, Any]) -> None:
    for keyword in REFUSED_KEYWORDS:
        if keyword in schema:
            raise UserError(
                f"the tool parser qwen-xml does not support {keyword!r} beside the properties of a"
                f" tool that must be followed: remove it from `parameters` of {tool.name!r}"
            )


def whole_pattern(pattern: str) -> str:
    """The regular expression of all texts in which a schema's pattern occurs.

    >>> whole_pattern("^a|b")
    '(?:a)(?s:.*)|(?s:.*)(?:b)(?s:.*)'
    """
    pattern = pattern.replace("\n", r"\n").replace(r"\/", "/").replace("/", r"\/")
    parts = []
    for part in alternatives(pattern):
        before = "" if part.startswith("^") else ANY_TEXT
        after = "" if part.endswith("$") and not part.endswith(r"\$") else ANY_TEXT
        parts.append(f"{before}(?:{part.removeprefix('^')[: None if after else -1]}){after}")
    return "|".join(parts)


def alternatives(pattern: str) -> list[str]:
    """The parts between the outermost bars of a regular expression."""
    parts = []
    start, depth, escaped = 0, 0, False
    for position, char in enumerate(pattern):
        if not escaped and char == "|" and depth == 0:
            parts.append(pattern[start:position])
            start = position + 1
            continue
        if not escaped:
            depth += (char in "([") - (char in ")]")
        escaped = char == "\\" and not escaped
    return [*parts, pattern[start:]]
