"""The fields `tools` and `tool_choice` of a request, and the rules that connect them."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, StringConstraints

from peagle.server.http.errors import ApiError
from peagle.server.http.schema.base import Items, RequestModel, TypeName

MAX_TOOLS = 512
NO_PARAMETERS = {"type": "object", "properties": {}}

# As long as Anthropic allows; OpenAI allows 64 characters.
FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class FunctionField(RequestModel):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # A JSON schema; None: there are no parameters.
    strict: bool | None = None
    _characters: int = PrivateAttr(0)

    def model_post_init(self, context: Any) -> None:
        """Count the characters while the body is checked: large ones are not on the event loop."""
        self._characters = len(self.description or "") + len(json.dumps(self.parameters or {}))

    @property
    def characters(self) -> int:
        return len(self.name) + self._characters


class ToolField(RequestModel):
    type: TypeName
    function: FunctionField | None = None

    @property
    def characters(self) -> int:
        """About the characters that the tool adds to the prompt."""
        return self.require_function().characters

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it: all fields, and only those that targets know."""
        function = self.require_function()
        return {
            "type": "function",
            "function": {
                "name": function.name,
                "description": function.description or "",
                "parameters": function.parameters or NO_PARAMETERS,
            },
        }

    def require_function(self) -> FunctionField:
        if self.type != "function":
            raise ApiError(
                400, f"tools of type {self.type!r} are not supported: use type function", "tools"
            )
        if self.function is None:
            raise ApiError(400, "tools: a tool without function: give its name", "tools")
        return self.function


class FunctionReference(RequestModel):
    name: FunctionName


class NamedToolChoice(RequestModel):
    """A function that the answer must call."""

    type: Literal["function"]
    function: FunctionReference


Tools = Annotated[Items[ToolField], Field(max_length=MAX_TOOLS)]
ToolChoiceField = Literal["none", "auto", "required"] | NamedToolChoice


def check_tools(tools: Sequence[ToolField], choice: ToolChoiceField | None) -> None:
    names = [tool.require_function().name for tool in tools]
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ApiError(400, f"tools: {name!r} is defined twice: rename one of them", "tools")
        seen.add(name)
    if not names and choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice requires tools: give them, or use auto", "tool_choice")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in seen:
        raise ApiError(
            400,
            f"tool_choice names {choice.function.name!r}, which is none of the tools: "
            + ", ".join(names[:16]),
            "tool_choice",
        )
