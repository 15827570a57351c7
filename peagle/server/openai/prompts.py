"""Prompts as token ids. A thread of its own tokenizes, so that long texts delay no one else."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from peagle.errors import UserError
from peagle.server.engines.engine_slot import EngineSlot
from peagle.server.engines.local_backend import LocalBackend
from peagle.server.http.errors import ApiError
from peagle.server.http.schema import Message

# No token is longer: a text with more characters per token of context cannot fit.
MAX_TOKEN_CHARS = 128
# Arguments of `apply_chat_template` that a request must not set.
RESERVED_TEMPLATE_KWARGS = (
    "chat_template",
    "conversation",
    "tokenize",
    "add_generation_prompt",
    "return_tensors",
    "return_dict",
    "padding",
    "truncation",
    "max_length",
    "tools",
    "documents",
    "tokenizer_kwargs",
    "messages",
)


async def encode_chat(
    backend: LocalBackend,
    messages: Sequence[Message],
    template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of the messages under the target's chat template."""
    conversation = [message.for_template() for message in messages]
    for name in template_kwargs or {}:
        if name in RESERVED_TEMPLATE_KWARGS:
            raise ApiError(
                400,
                f"chat_template_kwargs.{name} is set by the server: leave it out",
                "chat_template_kwargs",
            )
    check_characters(backend, sum(len(message["content"]) for message in conversation))
    pair = backend.engines.require_ready()
    if not template_kwargs:
        return await run_tokenizer(backend, lambda: pair.encode(conversation))
    tokenizer = pair.target.tokenizer

    def encode() -> list[int]:
        try:
            return tokenizer.apply_chat_template(
                conversation, add_generation_prompt=True, **template_kwargs
            )["input_ids"]
        except Exception as error:  # A template may raise anything.
            raise UserError(f"the messages do not fit the chat template: {error}") from error

    return await run_tokenizer(backend, encode)


async def encode_text(
    backend: LocalBackend, prompt: str | list[int], add_special_tokens: bool = True
) -> list[int]:
    """Token ids of a prompt, which may be token ids already."""
    if isinstance(prompt, list):
        return prompt
    check_characters(backend, len(prompt))
    tokenizer = backend.engines.require_ready().target.tokenizer
    return await run_tokenizer(
        backend,
        lambda: list(tokenizer(prompt, add_special_tokens=add_special_tokens)["input_ids"]),
    )


async def run_tokenizer(backend: LocalBackend, encode: Callable[[], list[int]]) -> list[int]:
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(backend.engines.tokenizer_thread, encode)
    except UserError as error:
        raise ApiError(400, str(error)) from error


def check_characters(backend: LocalBackend, characters: int) -> None:
    """Refuse, before it is tokenized, a text that cannot fit the context."""
    context = backend.engines.context
    if characters > context * MAX_TOKEN_CHARS:
        raise ApiError(
            400,
            f"a prompt of {characters} characters does not fit the context of {context} tokens:"
            " shorten it",
        )


def check_prompt(slot: EngineSlot, ids: list[int], max_new_tokens: int | None) -> None:
    """Refuse a prompt that the engine cannot answer, or that leaves no room for the answer."""
    try:
        slot.engine.check_prompt(ids)
    except UserError as error:
        raise ApiError(400, str(error), "prompt") from error
    context = slot.engine.context
    if max_new_tokens is not None and len(ids) + max_new_tokens > context:
        raise ApiError(
            400,
            f"the prompt has {len(ids)} tokens and the answer may have {max_new_tokens}, but the"
            f" context holds {context}: shorten the prompt, or lower max_tokens",
            "max_tokens",
        )
