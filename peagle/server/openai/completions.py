"""/v1/completions: one or several prompts, as text or token ids, echoed on request."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response

from peagle.server.front.engine_backend import EngineBackend, engine_backend_of
from peagle.server.http.cache_salt import derive_salt
from peagle.server.http.limits import validate_body
from peagle.server.http.logs import request_log_fields
from peagle.server.http.schema import CompletionRequest
from peagle.server.http.sse import cancel_on_disconnect
from peagle.server.openai.choice import Choice
from peagle.server.openai.logprobs import completion_logprobs
from peagle.server.openai.prompts import encode_text, run_tokenizer
from peagle.server.openai.reply import Reply
from peagle.server.openai.submit import submit
from peagle.server.tokenization.token_text import TokenTexts

if TYPE_CHECKING:
    from peagle.engine.stream import StreamPiece, TokenLogprob


async def complete(request: Request, body: dict[str, Any]) -> Response:
    backend = engine_backend_of(request)
    completion_request = await validate_body(request, CompletionRequest, body)
    backend.require(completion_request.model)
    return await cancel_on_disconnect(request, respond(request, backend, completion_request))


async def respond(request: Request, backend: EngineBackend, body: CompletionRequest) -> Response:
    prompts = [
        await encode_text(backend, prompt, body.add_special_tokens is not False)
        for prompt in body.prompts
    ]
    if backend.settings.log_prompts:
        request_log_fields(request.scope)["prompt"] = body.prompts
    echo = None
    if body.echo:
        echo = [await prompt_text(backend, prompt) for prompt in body.prompts]
    salt = derive_salt(request.scope, body.cache_salt)
    learn = backend.learn_consent.allows(request.scope, body)
    answer = await submit(backend, body, prompts, salt, learn=learn)
    layout = CompletionLayout(
        backend.engines.require_text().texts, body.logprobs_count is not None, echo, body.choices
    )
    return await Reply(backend, body, answer, layout).response(request)


async def prompt_text(backend: EngineBackend, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    tokenizer = backend.engines.require_text().tokenizer
    return await run_tokenizer(backend, len(prompt), lambda: tokenizer.decode(prompt))


class CompletionLayout:
    object_type = "text_completion"
    chunk_type = "text_completion"
    id_prefix = "cmpl"

    def __init__(
        self, texts: TokenTexts, logprobs: bool, echo: list[str] | None, choices_per_prompt: int
    ) -> None:
        """`echo`: the texts of the prompts, if they are echoed."""
        self.texts = texts
        self.logprobs = logprobs
        self.echo = echo
        self.choices_per_prompt = choices_per_prompt
        # By choice: characters of the tokens whose log-probabilities were written so far.
        self._offsets: dict[int, int] = {}

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        if self.echo is None:
            return None
        return self._choice(choice, self._echoed(choice), self._prompt_logprobs(choice))

    def pieces(self, choice: Choice, piece: "StreamPiece") -> list[dict[str, Any]]:
        if not piece.text and not piece.logprobs:
            return []
        return [self._choice(choice, piece.text, piece.logprobs)]

    def empty(self, choice: Choice) -> dict[str, Any]:
        return self._choice(choice, "", ())

    def ending(self, choice: Choice) -> dict[str, Any]:
        ending = {"index": choice.index, "text": "", "logprobs": None}
        return ending | {"finish_reason": choice.finish_reason}

    def whole(self, choice: Choice) -> dict[str, Any]:
        text = self._echoed(choice) + choice.text
        logprobs = [*self._prompt_logprobs(choice), *choice.logprobs]
        return self._choice(choice, text, logprobs) | {"finish_reason": choice.finish_reason}

    def _echoed(self, choice: Choice) -> str:
        return "" if self.echo is None else self.echo[choice.index // self.choices_per_prompt]

    def _prompt_logprobs(self, choice: Choice) -> "list[TokenLogprob | None]":
        """One entry per prompt token, None for the first; empty unless the prompt was scored."""
        return [] if choice.prompt_logprobs is None else [None, *choice.prompt_logprobs]

    def _choice(
        self, choice: Choice, text: str, tokens: "Sequence[TokenLogprob | None]"
    ) -> dict[str, Any]:
        logprobs = self._write_logprobs(choice, tokens) if self.logprobs else None
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _write_logprobs(
        self, choice: Choice, tokens: "Sequence[TokenLogprob | None]"
    ) -> dict[str, Any]:
        offset = self._offsets.get(choice.index, 0)
        logprobs = completion_logprobs(self.texts, tokens, offset, choice.prompt[0])
        self._offsets[choice.index] = offset + sum(map(len, logprobs["tokens"]))
        return logprobs
