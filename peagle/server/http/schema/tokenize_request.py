"""The bodies of /tokenize and /detokenize."""

from typing import Annotated, Any

from pydantic import Field

from peagle.server.http.schema.base import Items, Name, RequestModel, TokenId
from peagle.server.http.schema.message import Messages, check_contents
from peagle.server.http.schema.tool_fields import Tools, check_tools

MAX_DETOKENIZE_IDS = 1 << 20


class TokenizeRequest(RequestModel):
    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        check_contents(self.messages or [])
        check_tools(self.tools or [], None)


class DetokenizeRequest(RequestModel):
    model: Name | None = None
    tokens: Annotated[Items[TokenId], Field(max_length=MAX_DETOKENIZE_IDS)]
