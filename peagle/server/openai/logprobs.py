"""Log-probabilities in OpenAI's two formats: objects for chat, parallel lists for completions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from peagle.server.tokenization.token_text import TokenTexts

if TYPE_CHECKING:
    from peagle.engine.stream import TokenLogprob

MIN_LOGPROB = -9999.0  # JSON has no infinity.


def finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def chat_logprobs(texts: TokenTexts, tokens: "Sequence[TokenLogprob]") -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": texts.text(token),
            "logprob": finite(logprob),
            "bytes": list(texts.raw(token)),
        }

    content = [
        entry(scored.token, scored.logprob)
        | {"top_logprobs": [entry(token, logprob) for token, logprob in scored.top.items()]}
        for scored in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    texts: TokenTexts,
    tokens: "Sequence[TokenLogprob | None]",
    offset: int = 0,
    first_id: int | None = None,
) -> dict[str, Any]:
    """The four lists of `logprobs`; `offset`: characters of the tokens before these.

    None stands for `first_id`, the first token of a prompt: nothing precedes it, so its entries
    are null.
    """
    token_texts: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for scored in tokens:
        if scored is None:
            assert first_id is not None
            text = texts.text(first_id)
            token_logprobs.append(None)
            top_logprobs.append(None)
        else:
            text = texts.text(scored.token)
            token_logprobs.append(finite(scored.logprob))
            top_logprobs.append(likeliest(texts, scored))
        token_texts.append(text)
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": token_texts,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": offsets,
    }


def likeliest(texts: TokenTexts, scored: "TokenLogprob") -> dict[str, float]:
    """The likeliest tokens by text, the chosen token included.

    Two tokens may have the same text (parts of characters do): the likelier one is kept.
    """
    top: dict[str, float] = {}
    for token, logprob in (*scored.top.items(), (scored.token, scored.logprob)):
        top.setdefault(texts.text(token), finite(logprob))
    return top
