"""Conversations as token ids, under the target's chat template."""

from typing import Any

from peagle.errors import UserError
from peagle.target import Target

Messages = list[dict[str, str]]


def encode_prompt(target: Target, messages: Messages) -> list[int]:
    """The prompt ids of a conversation, up to the header of the assistant's turn."""
    return _template(target, messages, add_generation_prompt=True)["input_ids"]


def encode_conversation(
    target: Target, messages: Messages
) -> tuple[list[int], list[tuple[int, int]]]:
    """All ids of a finished conversation, and the span [start, end) of each answer in them.

    An answer begins where the template's prompt for it ends, and ends after the first stop token.
    """
    ids = _template(target, messages)["input_ids"]
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = encode_prompt(target, messages[:turn])
        start = len(prompt)
        if ids[:start] != prompt:
            raise ValueError("the template does not repeat earlier turns as they were prompted")
        stop = next((i + 1 for i in range(start, len(ids)) if ids[i] in target.stop_ids), len(ids))
        spans.append((start, stop))
    if not spans:
        raise ValueError("the conversation has no assistant turn")
    return ids, spans


def _template(target: Target, messages: Messages, **options: Any) -> Any:
    tokenizer = target.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise UserError(f"target {target.name!r} has no chat template: training needs one")
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # Templates raise errors of any type.
        raise ValueError(f"the conversation does not fit the chat template: {error}") from error
