"""From what a client sends to token ids, on a thread of its own: a long text must not hold up the others."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from peagle.errors import UserError
from peagle.server.engines.local_backend import LocalBackend
from peagle.server.http.errors import ApiError
from peagle.server.http.schema import Message

LONGEST_TOKEN = 128  # characters: a text of more than that times the context cannot fit
SERVERS = (
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


async def chat_ids(
    front: LocalBackend, messages: Sequence[Message], more: dict[str, Any] | None = None
) -> list[int]:
    """Under the target's chat template; `more`: what the template may want to know."""
    plain = [message.plain() for message in messages]
    if bad := next((name for name in more or {} if name in SERVERS), None):
        raise ApiError(
            400,
            f"chat_template_kwargs.{bad} is for the server to say: leave it out",
            "chat_template_kwargs",
        )
    check_length(front, sum(len(message["content"]) for message in plain))
    pair = front.engines.require_ready()
    if not more:
        return await tokenized(front, lambda: pair.encode(plain))
    tokenizer = pair.target.tokenizer

    def templated() -> list[int]:
        try:
            return tokenizer.apply_chat_template(plain, add_generation_prompt=True, **more)[
                "input_ids"
            ]
        except Exception as error:  # jinja raises whatever the template's author chose
            raise UserError(f"the messages do not fit the chat template: {error}") from error

    return await tokenized(front, templated)


async def text_ids(front: LocalBackend, prompt: str | list[int], special: bool = True) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    check_length(front, len(prompt))
    tokenizer = front.engines.require_ready().target.tokenizer
    return await tokenized(
        front, lambda: list(tokenizer(prompt, add_special_tokens=special)["input_ids"])
    )


async def tokenized(front: LocalBackend, encode: Callable[[], list[int]]) -> list[int]:
    try:
        return await asyncio.get_running_loop().run_in_executor(front.engines.tokenizing, encode)
    except UserError as error:
        raise ApiError(400, str(error)) from error


def check_length(front: LocalBackend, characters: int) -> None:
    most = front.engines.context
    if characters > most * LONGEST_TOKEN:
        raise ApiError(
            400,
            f"a prompt of {characters} characters does not fit the context of {most} tokens: shorten it",
        )


def check_room(context: int, prompt: int, answer: int | None) -> None:
    """What was asked for must fit; without a limit an answer ends with the context."""
    if prompt >= context:
        raise ApiError(
            400,
            f"the prompt has {prompt} tokens, but with one token of the answer it must fit the context of {context}",
        )
    if answer is not None and prompt + answer > context:
        raise ApiError(
            400,
            f"the prompt has {prompt} tokens and the answer may have {answer}, but the context holds {context}:"
            " shorten the prompt, or lower max_tokens",
            "max_tokens",
        )
