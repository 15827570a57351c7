"""/tokenize and /detokenize: text or messages to token ids, and back."""

from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from peagle.server.engines.local_backend import local_backend_of
from peagle.server.http.errors import ApiError
from peagle.server.http.limits import validated
from peagle.server.http.schema import DetokenizeRequest, TokenizeRequest
from peagle.server.openai.prompts import chat_ids, check_length, text_ids


async def tokenize(request: Request, body: dict[str, Any]) -> Response:
    front = local_backend_of(request)
    asked = validated(TokenizeRequest, body)
    front.require(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give either prompt or messages")
    if asked.messages is not None:
        ids = await chat_ids(front, asked.messages)
    else:
        ids = await text_ids(front, asked.prompt or "", asked.add_special_tokens is not False)
    texts = front.engines.texts
    told = (
        [texts.text(token) for token in ids]
        if asked.return_token_strs and texts is not None
        else None
    )
    context = front.engines.context
    return JSONResponse(
        {"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": told}
    )


async def detokenize(request: Request, body: dict[str, Any]) -> Response:
    front = local_backend_of(request)
    asked = validated(DetokenizeRequest, body)
    pair = front.require(asked.model)
    check_length(front, len(asked.tokens))
    size = max(pair.target.vocab_size, len(pair.target.tokenizer))
    if bad := [token for token in asked.tokens if token >= size]:
        raise ApiError(400, f"token ids {bad[:5]} are outside the vocabulary of {size}", "tokens")
    return JSONResponse(
        {"prompt": pair.target.tokenizer.decode(asked.tokens, skip_special_tokens=False)}
    )
