"""/v1/completions: text or token ids, one prompt or several, echoed if wanted with their own log-probabilities."""

from typing import TYPE_CHECKING, Any

from fastapi import Request, Response

from peagle.server.engines.local_backend import LocalBackend, local_backend_of
from peagle.server.engines.token_text import TokenTexts
from peagle.server.http.limits import validated
from peagle.server.http.logs import request_notes
from peagle.server.http.schema import CompletionRequest
from peagle.server.http.sse import unless_gone
from peagle.server.openai.answer import Choice
from peagle.server.openai.logprobs import completion_logprobs
from peagle.server.openai.prompts import text_ids
from peagle.server.openai.reply import Reply, texts_of
from peagle.server.openai.submit import ask

if TYPE_CHECKING:
    from peagle.engine.stream import StreamPiece, TokenLogprob


async def complete(request: Request, body: dict[str, Any]) -> Response:
    front = local_backend_of(request)
    asked = validated(CompletionRequest, body)
    front.require(asked.model)
    return await unless_gone(request, answered(request, front, asked))


async def answered(request: Request, front: LocalBackend, asked: CompletionRequest) -> Response:
    prompts = [
        await text_ids(front, prompt, asked.add_special_tokens is not False)
        for prompt in asked.prompts
    ]
    if front.settings.log_prompts:
        request_notes(request.scope)["prompt"] = asked.prompts
    echoed = [shown(front, prompt) for prompt in asked.prompts] if asked.echo else None
    answer = await ask(front, asked, prompts)
    layout = CompletionLayout(texts_of(front), asked.top is not None, echoed, asked.choices)
    return await Reply.to(request, front, asked, answer, layout).response(request)


def shown(front: LocalBackend, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else front.engines.require_ready().decode(prompt)


class CompletionLayout:
    object = chunk = "text_completion"
    prefix = "cmpl"

    def __init__(
        self, texts: TokenTexts, logprobs: bool, echoed: list[str] | None, each: int
    ) -> None:
        """`echoed`: the prompts' texts; `each`: choices of a prompt."""
        self.texts, self.logprobs, self.echoed, self.each = texts, logprobs, echoed, each
        self.offsets: dict[int, int] = {}  # by choice: characters of the tokens told so far

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        if self.echoed is None:
            return None
        told = self._told(choice, self._prompt(choice)) if self.logprobs else None
        return self._choice(choice, self._echo(choice), told)

    def piece(self, choice: Choice, piece: "StreamPiece") -> dict[str, Any]:
        return self._choice(
            choice, piece.text, self._told(choice, list(piece.logprobs)) if self.logprobs else None
        )

    def ending(self, choice: Choice) -> dict[str, Any]:
        return self._choice(choice, "", None) | {"finish_reason": choice.reason}

    def whole(self, choice: Choice) -> dict[str, Any]:
        told = (
            self._told(choice, [*self._prompt(choice), *choice.logprobs]) if self.logprobs else None
        )
        return self._choice(choice, self._echo(choice) + choice.text, told) | {
            "finish_reason": choice.reason
        }

    def _echo(self, choice: Choice) -> str:
        return self.echoed[choice.index // self.each] if self.echoed is not None else ""

    def _prompt(self, choice: Choice) -> "list[TokenLogprob | None]":
        """Of an echoed prompt; None for its first token."""
        return [None, *choice.scored] if choice.scored is not None else []

    def _told(self, choice: Choice, told: "list[Any]") -> dict[str, Any]:
        at = self.offsets.get(choice.index, 0)
        laid = completion_logprobs(self.texts, told, at, choice.prompt[0])
        self.offsets[choice.index] = at + sum(map(len, laid["tokens"]))
        return laid

    def _choice(self, choice: Choice, text: str, told: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": choice.index, "text": text, "logprobs": told, "finish_reason": None}
