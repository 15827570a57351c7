"""Log-probabilities in OpenAI's two layouts: chat's list of objects, completions' four lists side by side."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from peagle.server.engines.token_text import TokenTexts

if TYPE_CHECKING:
    from peagle.engine.stream import TokenLogprob

LEAST = -9999.0  # JSON has no infinity


def finite(value: float) -> float:
    return value if value > LEAST else LEAST


def chat_logprobs(texts: TokenTexts, told: "Sequence[TokenLogprob]") -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": texts.text(token),
            "logprob": finite(logprob),
            "bytes": list(texts.raw(token)),
        }

    content = [
        entry(one.token, one.logprob)
        | {"top_logprobs": [entry(token, value) for token, value in one.top.items()]}
        for one in told
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    texts: TokenTexts,
    told: "Sequence[TokenLogprob | None]",
    offset: int = 0,
    first: int | None = None,
) -> dict[str, Any]:
    """`first`: the token that nothing is known of, for nothing is before it; its entries are null.

    The token taken is among the likeliest even where it is not one of them. Two tokens may look the same (halves of
    characters do): the likelier one is told.
    """
    tokens, values, tops, offsets = (
        list[str](),
        list[float | None](),
        list[dict[str, float] | None](),
        list[int](),
    )
    for one in told:
        if one is None:
            assert first is not None
            text, value, top = texts.text(first), None, None
        else:
            text, value, top = texts.text(one.token), finite(one.logprob), top_of(texts, one)
        tokens.append(text)
        values.append(value)
        tops.append(top)
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def top_of(texts: TokenTexts, one: "TokenLogprob") -> dict[str, float]:
    top: dict[str, float] = {}
    for token, value in (*one.top.items(), (one.token, one.logprob)):
        top.setdefault(texts.text(token), finite(value))
    return top
