"""The grammar of Qwen3-Coder's calls: parameters in the order of the schema, optional ones if any.

Values that can only be strings are text; others are JSON. What applies to all parameters together
(`anyOf` beside `properties`, for example) cannot be expressed and is refused.
"""

from typing import Any

from peagle.errors import UserError
from peagle.server.parsing.formats.call_grammar import ANY_TEXT, BoundTool, json_value, quoted
from peagle.server.parsing.formats.qwen_values import allowed_types, resolve

VALUE_END = quoted("\n</parameter>\n")
TEXT_RULES = (
    f"FREE_TEXT: /{ANY_TEXT}/ & ~/{ANY_TEXT}<\\/parameter>{ANY_TEXT}/",
    f"TEXT_VALUE: FREE_TEXT {VALUE_END}",
)
ANY_PARAMETER = 'any_parameter: "<parameter=" /[A-Za-z0-9_.-]{1,64}/ ">\\n" TEXT_VALUE'
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


def function_body(tool: BoundTool) -> str:
    """What stands between the tags of a call, in Lark's notation."""
    schema = resolve(tool.schema, tool.schema)
    for keyword in REFUSED_KEYWORDS:
        if keyword in schema:
            raise UserError(
                f"the tool parser qwen-xml does not support {keyword!r} beside the properties of a"
                f" tool that must be followed: remove it from `parameters` of {tool.name!r}"
            )
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    parameters = [
        parameter(tool, key, value) + ("" if key in required else "?")
        for key, value in properties.items()
    ]
    parameters += [parameter(tool, key, True) for key in required if key not in properties]
    if not parameters and schema.get("additionalProperties") is not False:
        parameters = ["any_parameter*"]
    head, tail = quoted(f"\n<function={tool.name}>\n"), quoted("</function>\n")
    return f"{head} {' '.join(parameters)} {tail}"


def parameter(tool: BoundTool, key: str, schema: Any) -> str:
    if not key or any(char in "<>\n" for char in key):
        raise UserError(
            f"the tool parser qwen-xml does not support the parameter {key!r} of {tool.name!r}:"
            " use letters, digits and underscores"
        )
    return f"({quoted(f'<parameter={key}>' + chr(10))} {value(tool, schema)})"


def value(tool: BoundTool, schema: Any) -> str:
    """A value with its end tag."""
    if allowed_types(schema, tool.schema) == {"string"}:
        return text_value(resolve(schema, tool.schema))
    definitions = {key: tool.schema[key] for key in ("$defs", "definitions") if key in tool.schema}
    schema = schema if isinstance(schema, dict) else {}
    return f"{json_value(schema | definitions)} {VALUE_END}"


def text_value(schema: dict[str, Any]) -> str:
    """A string as text; its limits of length and its pattern hold."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices is not None:
        return f"({' | '.join(quoted(str(choice)) for choice in choices)}) {VALUE_END}"
    return "TEXT_VALUE"
