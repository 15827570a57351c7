"""Prompts as token ids, made on the tokenizer's threads."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from peagle.errors import UserError
from peagle.server.front.engine_backend import EngineBackend
from peagle.server.front.remote_slot import RemoteSlot
from peagle.server.http.errors import ApiError
from peagle.server.http.schema import Message, ToolField
from peagle.server.openai.answer_format import DEFAULT_TOOL_FORMAT, answer_format
from peagle.server.openai.tool_prompt import tools_as_text, with_argument_texts
from peagle.server.tokenization.prompt_tokenizer import EncodedChat, TemplateError
from peagle.server.tokenization.tokenizer_threads import SHORT_CHARS

T = TypeVar("T")
LONG_CHARS = SHORT_CHARS + 1
# Tokens of a text that /tokenize counts, where the context is shorter.
MAX_TOKENIZE_TOKENS = 1 << 20
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
    "continue_final_message",
    "return_assistant_tokens_mask",
)


async def encode_chat(
    backend: EngineBackend,
    messages: Sequence[Message],
    template_kwargs: dict[str, Any] | None = None,
    is_prompt: bool = True,
    tools: Sequence[ToolField] = (),
) -> EncodedChat:
    """Messages and tools as a prompt, under the target's chat template."""
    template_kwargs = template_kwargs or {}
    for name in template_kwargs:
        if name in RESERVED_TEMPLATE_KWARGS:
            raise ApiError(
                400,
                f"chat_template_kwargs.{name} is set by the server: leave it out",
                "chat_template_kwargs",
            )
    characters = sum(message.characters for message in messages)
    characters += sum(map(argument_characters, template_kwargs.values()))
    characters += sum(tool.characters for tool in tools)
    max_tokens = max_text_tokens(backend, is_prompt)
    form = answer_format(backend)

    def encode() -> EncodedChat:
        conversation = [message.for_template() for message in messages]
        functions = [tool.for_template() for tool in tools]
        if not form.template_shows_tools:
            is_hermes = form.tools.name == DEFAULT_TOOL_FORMAT
            conversation = tools_as_text(conversation, functions, is_hermes)
            functions = []
        tokenizer = backend.engines.require_text().tokenizer
        try:
            return tokenizer.encode_chat(conversation, template_kwargs, max_tokens, functions)
        except TemplateError:
            # Most templates iterate the arguments of calls; DeepSeek's concatenates their text.
            if not any("tool_calls" in message for message in conversation):
                raise
            conversation = [with_argument_texts(message) for message in conversation]
            return tokenizer.encode_chat(conversation, template_kwargs, max_tokens, functions)

    return await run_tokenizer(backend, characters, encode, is_prompt)


async def encode_text(
    backend: EngineBackend,
    prompt: str | list[int],
    add_special_tokens: bool = True,
    is_prompt: bool = True,
) -> list[int]:
    """Token ids of a prompt, which may be token ids already."""
    if isinstance(prompt, list):
        context = backend.engines.context
        if len(prompt) > context:
            raise ApiError(
                400,
                f"the prompt is too long: {len(prompt)} tokens do not fit the context of {context}",
            )
        return prompt
    max_tokens = max_text_tokens(backend, is_prompt)
    return await run_tokenizer(
        backend,
        len(prompt),
        lambda: backend.engines.require_text().tokenizer.encode(
            prompt, max_tokens, add_special_tokens
        ),
        is_prompt,
    )


def max_text_tokens(backend: EngineBackend, is_prompt: bool) -> int:
    """Tokens above which a text is refused before it is tokenized whole."""
    context = backend.engines.context
    return context if is_prompt else max(context, MAX_TOKENIZE_TOKENS)


async def run_tokenizer(
    backend: EngineBackend, characters: int, work: Callable[[], T], is_prompt: bool = True
) -> T:
    """Run `work` on a text of so many characters, on a thread of the tokenizer."""
    backend.engines.require_loaded()
    try:
        return await backend.engines.tokenizer_threads.run(characters, work, is_prompt)
    except UserError as error:
        raise ApiError(400, str(error)) from error


def argument_characters(value: Any) -> int:
    """The characters of a template's argument; a list or an object counts as a long text."""
    if isinstance(value, str):
        return len(value)
    return LONG_CHARS if isinstance(value, list | dict) and value else 1


def check_prompt(slot: RemoteSlot, ids: list[int], max_new_tokens: int | None) -> None:
    """Refuse a prompt that the engine cannot answer, or that leaves no room for the answer."""
    try:
        slot.check_prompt(ids)
    except UserError as error:
        raise ApiError(400, str(error), "prompt") from error
    context = slot.context
    if max_new_tokens is not None and len(ids) + max_new_tokens > context:
        raise ApiError(
            400,
            f"the prompt has {len(ids)} tokens and the answer may have {max_new_tokens}, but the"
            f" context holds {context}: shorten the prompt, or lower max_tokens",
            "max_tokens",
        )
