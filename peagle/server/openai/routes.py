"""The handlers of the OpenAI endpoints, for a backend with engines in this process."""

from collections.abc import Mapping

from peagle.server.engines.engine_pool import EnginePool
from peagle.server.engines.local_backend import LocalBackend
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


def create_local_backend(
    settings: ServerSettings, engines: EnginePool | None = None
) -> LocalBackend:
    return LocalBackend(settings, HANDLERS, engines or EnginePool(settings))
