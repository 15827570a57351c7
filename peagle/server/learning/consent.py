"""LearnConsent: whether a request and its answer may be stored for training.

A request opts out by `peagle: {"learn": false}`; the server's `learn_opt_out` names users and API
keys that never take part. A key is compared as a digest and is not written anywhere.
"""

from starlette.types import Scope

from peagle.server.http.auth import API_KEY_DIGEST, digest
from peagle.server.http.schema import ChatRequest, CompletionRequest
from peagle.server.settings import ServerSettings


class LearnConsent:
    def __init__(self, settings: ServerSettings) -> None:
        self.enabled = settings.learn is not None
        self.users = frozenset(settings.learn_opt_out)
        self.key_digests = frozenset(map(digest, settings.learn_opt_out))

    def allows(self, scope: Scope, body: ChatRequest | CompletionRequest) -> bool:
        if not self.enabled:
            return False
        if body.peagle is not None and body.peagle.learn is False:
            return False
        has_opted_out = body.user in self.users or scope.get(API_KEY_DIGEST) in self.key_digests
        return not has_opted_out
