"""The handlers of the endpoints, for a backend with engines of this package."""

from collections.abc import Mapping

from peagle.server.anthropic.messages_api import count_tokens, create_message
from peagle.server.drafter_api import change_drafter, show_drafter
from peagle.server.front.engine_backend import EngineBackend
from peagle.server.front.engine_client import EngineClient
from peagle.server.http.backend import RouteHandler
from peagle.server.openai.chat import chat
from peagle.server.openai.completions import complete
from peagle.server.openai.tokenize import detokenize, tokenize
from peagle.server.responses.responses_api import ResponsesApi
from peagle.server.settings import ServerSettings


def create_handlers(settings: ServerSettings) -> Mapping[str, RouteHandler]:
    responses = ResponsesApi(settings)
    return {
        "chat": chat,
        "complete": complete,
        "tokenize": tokenize,
        "detokenize": detokenize,
        "create_response": responses.create,
        "retrieve_response": responses.retrieve,
        "delete_response": responses.delete,
        "create_message": create_message,
        "count_tokens": count_tokens,
        "show_drafter": show_drafter,
        "change_drafter": change_drafter,
    }


def create_engine_backend(
    settings: ServerSettings, engines: EngineClient, ready_wait: float = 0.0
) -> EngineBackend:
    return EngineBackend(settings, create_handlers(settings), engines, ready_wait)
