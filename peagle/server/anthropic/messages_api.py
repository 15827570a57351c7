"""/v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from peagle.server.anthropic.chat_body import chat_body, prompt_body
from peagle.server.anthropic.message_object import MessageObject
from peagle.server.anthropic.message_reply import MessageReply
from peagle.server.front.engine_backend import EngineBackend, engine_backend_of
from peagle.server.http.limits import body_bytes, parse_model, run_for_size, validate
from peagle.server.http.schema import AgentChatRequest
from peagle.server.http.schema.message_request import CountTokensRequest, MessageRequest
from peagle.server.http.sse import cancel_on_disconnect
from peagle.server.openai.chat_answer import start_chat
from peagle.server.openai.prompts import encode_chat


async def create_message(request: Request, body: dict[str, Any]) -> Response:
    backend = engine_backend_of(request)

    def translate() -> tuple[MessageRequest, AgentChatRequest]:
        parsed = parse_model(MessageRequest, body)
        body.clear()  # Unknown fields are not kept in memory.
        return parsed, validate(AgentChatRequest, chat_body(parsed))

    parsed, chat_request = await run_for_size(body_bytes(request), translate)
    backend.require(parsed.model)
    return await cancel_on_disconnect(request, respond(request, backend, parsed, chat_request))


async def respond(
    request: Request, backend: EngineBackend, parsed: MessageRequest, chat_request: AgentChatRequest
) -> Response:
    chat_answer = await start_chat(request, backend, chat_request)
    message = MessageObject(parsed, parsed.model or backend.model_name)
    return await MessageReply(message, chat_answer).response(request)


async def count_tokens(request: Request, body: dict[str, Any]) -> Response:
    backend = engine_backend_of(request)

    def translate() -> AgentChatRequest:
        parsed = parse_model(CountTokensRequest, body)
        body.clear()
        return validate(AgentChatRequest, prompt_body(parsed))

    chat_request = await run_for_size(body_bytes(request), translate)
    backend.require_ready(chat_request.model)
    prompt = await encode_chat(
        backend,
        chat_request.messages,
        chat_request.template_kwargs,
        is_prompt=False,
        tools=chat_request.shown_tools,
    )
    return JSONResponse({"input_tokens": len(prompt.ids)})
