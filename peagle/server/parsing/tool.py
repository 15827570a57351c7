"""Tool: a function that an answer may call. ToolChoice: which calls an answer may or must make."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from peagle.errors import UserError


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str = ""
    parameters: dict[str, Any] | None = field(default_factory=dict)  # A JSON schema.
    strict: bool = False

    def arguments_schema(self) -> dict[str, Any]:
        """The schema of the arguments object; without parameters, any object.

        UserError: the parameters cannot describe an object.
        """
        schema = self.parameters if self.parameters is not None else {}
        if not isinstance(schema, dict):
            raise UserError(f"`parameters` of the tool {self.name!r} must be a JSON schema object")
        kind = schema.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise UserError(
                f"`parameters` of the tool {self.name!r} must have the type 'object', not {kind!r}"
            )
        return schema | {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    kind: Literal["auto", "none", "required", "function"] = "auto"
    name: str = ""  # Of the function, for the kind "function".
    parallel: bool = True  # Several calls in one answer.

    def select(self, tools: Sequence[Tool]) -> Sequence[Tool]:
        """The tools that a forced call can name; UserError: the named one does not exist."""
        if self.kind != "function":
            return tools
        named = [tool for tool in tools if tool.name == self.name]
        if not named:
            names = ", ".join(tool.name for tool in tools)
            raise UserError(
                f"`tool_choice` names the function {self.name!r}, which is not in `tools`: {names}"
            )
        return named
