"""/tokenize and /detokenize: text or messages to token ids, and token ids to text."""

from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from peagle.server.front.engine_backend import engine_backend_of
from peagle.server.http.errors import ApiError
from peagle.server.http.limits import validate_body
from peagle.server.http.schema import DetokenizeRequest, TokenizeRequest
from peagle.server.openai.prompts import encode_chat, encode_text, run_tokenizer


async def tokenize(request: Request, body: dict[str, Any]) -> Response:
    backend = engine_backend_of(request)
    tokenize_request = await validate_body(request, TokenizeRequest, body)
    backend.require_ready(tokenize_request.model)
    prompt = tokenize_request.prompt
    messages = tokenize_request.messages
    if messages is not None and prompt is None:
        kwargs = tokenize_request.chat_template_kwargs
        tools = tokenize_request.tools or ()
        ids = (await encode_chat(backend, messages, kwargs, is_prompt=False, tools=tools)).ids
    elif prompt is not None and messages is None:
        add_special_tokens = tokenize_request.add_special_tokens is not False
        ids = await encode_text(backend, prompt, add_special_tokens, is_prompt=False)
    else:
        raise ApiError(400, "give either prompt or messages")
    texts = backend.engines.require_text().texts if tokenize_request.return_token_strs else None

    def answer() -> Response:
        strings = None if texts is None else [texts.text(token) for token in ids]
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": backend.engines.context,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    return await run_tokenizer(backend, len(ids), answer, is_prompt=False)


async def detokenize(request: Request, body: dict[str, Any]) -> Response:
    backend = engine_backend_of(request)
    detokenize_request = await validate_body(request, DetokenizeRequest, body)
    backend.require_ready(detokenize_request.model)
    tokenizer = backend.engines.require_text().tokenizer
    ids = detokenize_request.tokens
    # Unlike a prompt, it may hold added tokens that the target has no embedding for.
    vocab_size = max(backend.engines.require_text().vocab_size, len(tokenizer.tokenizer))

    def answer() -> Response:
        if invalid := [token for token in ids if token >= vocab_size]:
            raise ApiError(
                400, f"token ids {invalid[:5]} are outside the vocabulary of {vocab_size}", "tokens"
            )
        return JSONResponse({"prompt": tokenizer.decode(ids, skip_special_tokens=False)})

    return await run_tokenizer(backend, len(ids), answer, is_prompt=False)
