"""The handlers of the OpenAI endpoints, for a backend with engines of this package."""

from collections.abc import Mapping

from peagle.server.front.engine_backend import EngineBackend
from peagle.server.front.engine_client import EngineClient
from peagle.server.http.backend import RouteHandler
from peagle.server.openai.chat import chat
from peagle.server.openai.completions import complete
from peagle.server.openai.tokenize import detokenize, tokenize
from peagle.server.settings import ServerSettings

HANDLERS: Mapping[str, RouteHandler] = {
    "chat": chat,
    "complete": complete,
    "tokenize": tokenize,
    "detokenize": detokenize,
}


def create_engine_backend(
    settings: ServerSettings, engines: EngineClient, ready_wait: float = 0.0
) -> EngineBackend:
    return EngineBackend(settings, HANDLERS, engines, ready_wait)
