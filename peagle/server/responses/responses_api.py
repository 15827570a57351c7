"""/v1/responses: create a response, continue one by its id, get it, delete it."""

from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from peagle.server.front.engine_backend import EngineBackend, engine_backend_of
from peagle.server.http.auth import API_KEY_DIGEST
from peagle.server.http.cache_salt import derive_salt, is_salt
from peagle.server.http.errors import ApiError
from peagle.server.http.limits import body_bytes, parse_model, run_for_size, validate
from peagle.server.http.schema import MAX_NAME_CHARS, AgentChatRequest
from peagle.server.http.schema.response_request import ResponseRequest
from peagle.server.http.sse import cancel_on_disconnect
from peagle.server.openai.chat_answer import start_chat
from peagle.server.responses.chat_body import chat_body, read_input
from peagle.server.responses.response_object import ResponseObject
from peagle.server.responses.response_reply import ResponseReply
from peagle.server.responses.response_store import (
    ResponseStore,
    StoredResponse,
    encode_messages,
    encode_response,
)
from peagle.server.responses.shared_response_store import SharedResponseStore, shared_store_path
from peagle.server.settings import ServerSettings
from peagle.server.translation.answer_blocks import AnswerBlock
from peagle.server.translation.conversation import ChatMessage, Conversation


class ResponsesApi:
    """The handlers, and the responses that they store."""

    def __init__(self, settings: ServerSettings) -> None:
        keys = len(settings.api_keys)
        self.store: ResponseStore | SharedResponseStore = ResponseStore(keys)
        if settings.http_workers > 1:
            self.store = SharedResponseStore(shared_store_path(), keys)

    async def create(self, request: Request, body: dict[str, Any]) -> Response:
        backend = engine_backend_of(request)
        size = body_bytes(request)
        parsed = await run_for_size(size, lambda: parse_model(ResponseRequest, body))
        body.clear()  # Unknown fields are not kept in memory.
        backend.require(parsed.model)
        previous = self._previous(request, parsed)

        def translate() -> tuple[list[ChatMessage], AgentChatRequest]:
            messages = read_input(parsed, previous.conversation() if previous else [])
            return messages, validate(AgentChatRequest, chat_body(parsed, messages))

        size += previous.size if previous else 0
        messages, chat_request = await run_for_size(size, translate)
        work = self._respond(request, backend, parsed, messages, chat_request)
        return await cancel_on_disconnect(request, work)

    async def retrieve(self, request: Request, _: dict[str, Any]) -> Response:
        stored = self._find(request, request_salt(request))
        return Response(stored.response, media_type="application/json")

    async def delete(self, request: Request, _: dict[str, Any]) -> Response:
        salt = request_salt(request)
        self._find(request, salt)
        response_id = request.path_params["response_id"]
        self.store.delete(response_id, salt)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def _respond(
        self,
        request: Request,
        backend: EngineBackend,
        parsed: ResponseRequest,
        messages: list[ChatMessage],
        chat_request: AgentChatRequest,
    ) -> Response:
        chat_answer = await start_chat(request, backend, chat_request)
        is_stored = parsed.store is not False
        response = ResponseObject(parsed, parsed.model or backend.model_name, is_stored)

        def on_finished(body: dict[str, Any], blocks: list[AnswerBlock]) -> None:
            if is_stored:
                salt = derive_salt(request.scope, parsed.cache_salt)
                key_digest = request.scope.get(API_KEY_DIGEST, b"")
                stored = store_response(key_digest, salt, body, messages, blocks)
                self.store.put(response.id, stored)

        return await ResponseReply(response, chat_answer, on_finished).response(request)

    def _previous(self, request: Request, parsed: ResponseRequest) -> StoredResponse | None:
        """The response that the request continues; None if it begins a conversation."""
        response_id = parsed.previous_response_id
        if not response_id:
            return None
        salt = derive_salt(request.scope, parsed.cache_salt)
        stored = self.store.get(response_id, salt)
        if stored is None:
            raise unknown_response(response_id, "previous_response_id")
        return stored

    def _find(self, request: Request, salt: str) -> StoredResponse:
        response_id = request.path_params["response_id"]
        stored = self.store.get(response_id, salt)
        if stored is None:
            raise unknown_response(response_id)
        return stored


def unknown_response(response_id: str, param: str | None = None) -> ApiError:
    return ApiError(
        404,
        f"there is no response {response_id[:MAX_NAME_CHARS]!r} for this API key and cache_salt:"
        " responses are lost with store: false, with a restart, and when they make room for newer"
        " ones; send the whole conversation as input",
        param,
    )


def request_salt(request: Request) -> str:
    """The salt of a request without a body, which may give `cache_salt` in its query."""
    requested = request.query_params.get("cache_salt")
    if requested is not None and not is_salt(requested):
        raise ApiError(400, f"cache_salt must have 1 to {MAX_NAME_CHARS} characters", "cache_salt")
    return derive_salt(request.scope, requested)


def store_response(
    key_digest: bytes,
    salt: str,
    body: dict[str, Any],
    messages: list[ChatMessage],
    blocks: list[AnswerBlock],
) -> StoredResponse:
    conversation = Conversation(messages)
    for block in blocks:
        conversation.add_block(block)
    return StoredResponse(
        key_digest, salt, encode_response(body), encode_messages(conversation.messages)
    )
