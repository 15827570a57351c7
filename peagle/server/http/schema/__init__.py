"""Request bodies, as Pydantic models: one file for each endpoint, and for what they share."""

from peagle.server.http.schema.base import MAX_LOGIT_BIAS, MAX_NAME_CHARS, RequestModel
from peagle.server.http.schema.chat_request import AgentChatRequest, ChatRequest
from peagle.server.http.schema.completion_request import CompletionRequest
from peagle.server.http.schema.drafter_request import DrafterRequest
from peagle.server.http.schema.generation_request import (
    Extension,
    GenerationRequest,
    ResponseFormat,
    StructuredOutputs,
)
from peagle.server.http.schema.message import Message
from peagle.server.http.schema.message_request import CountTokensRequest, MessageRequest
from peagle.server.http.schema.response_request import ResponseRequest
from peagle.server.http.schema.tokenize_request import DetokenizeRequest, TokenizeRequest
from peagle.server.http.schema.tool_fields import NamedToolChoice, ToolField
from peagle.server.http.schema.unsupported import refuse_unsupported

__all__ = [
    "MAX_LOGIT_BIAS",
    "MAX_NAME_CHARS",
    "AgentChatRequest",
    "ChatRequest",
    "CompletionRequest",
    "CountTokensRequest",
    "DetokenizeRequest",
    "DrafterRequest",
    "Extension",
    "GenerationRequest",
    "Message",
    "MessageRequest",
    "NamedToolChoice",
    "RequestModel",
    "ResponseFormat",
    "ResponseRequest",
    "StructuredOutputs",
    "TokenizeRequest",
    "ToolField",
    "refuse_unsupported",
]
