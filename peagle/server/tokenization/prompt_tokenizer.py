"""PromptTokenizer: the target's tokenizer, safe for several threads, with a limit before the work.

Tokenizing takes seconds for a million characters, so that a text that cannot fit is refused before
it is tokenized whole: by its size, then by the tokens of its pieces.
"""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from peagle.errors import UserError

# Characters per token of tokenizers whose longest token is unknown, or that shorten texts.
DEFAULT_TOKEN_CHARS = 128
PIECE_CHARS = 1 << 14
# Tokens by which a piece may have more than its part of the whole text: it may begin and end in
# the middle of a word.
PIECE_EXTRA_TOKENS = 256
ENDING_CHARS = 256


class TemplateError(UserError):
    """The chat template raised an error for these messages."""


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A conversation as a prompt."""

    ids: list[int]
    ending: str  # The last characters of its text.


class PromptTokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.is_byte_level = is_plain_byte_level(backend)
        vocabulary = tokenizer.get_vocab() if self.is_byte_level else {}
        # Bytes of a byte-level tokenizer: its vocabulary has one character for each byte.
        self.token_size = max(map(len, vocabulary), default=DEFAULT_TOKEN_CHARS)
        self._lock: AbstractContextManager[Any] = threading.Lock()
        if backend is not None:
            # Encoding changes a Rust tokenizer only where these are set: threads may share it then.
            backend.no_truncation()
            backend.no_padding()
            self._lock = nullcontext()
        self.is_fast = backend is not None

    def encode(self, text: str, max_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. UserError: it has more than `max_tokens`, as far as is known now."""
        self._check_length(text, max_tokens)
        return self._encode(text, add_special_tokens)

    @property
    def chat_template(self) -> str:
        """The source of the chat template; where there are several, of the one for tools."""
        template = self.tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default")
        return template or ""

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        template_kwargs: dict[str, Any],
        max_tokens: int,
        tools: Sequence[dict[str, Any]] = (),
    ) -> EncodedChat:
        """Token ids of messages under the target's chat template, which has the special tokens."""
        template_kwargs = template_kwargs | {"tools": list(tools) or None}
        # The template may repeat texts and add others: what counts is what it renders.
        text = self._apply_template(messages, template_kwargs, False)
        if self.is_fast:
            ids = self.encode(text, max_tokens, add_special_tokens=False)
        else:  # Some of these read special tokens in messages, but not in text.
            self._check_length(text, max_tokens)
            with self._lock:
                ids = list(self._apply_template(messages, template_kwargs, True)["input_ids"])
        return EncodedChat(ids, text[-ENDING_CHARS:])

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with self._lock:
            return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _apply_template(
        self, messages: Sequence[dict[str, Any]], template_kwargs: dict[str, Any], tokenize: bool
    ) -> Any:
        if not self.tokenizer.chat_template:
            raise UserError("the target has no chat template: use /v1/completions")
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=tokenize, **template_kwargs
            )
        except Exception as error:  # A template may raise anything.
            raise TemplateError(f"the messages do not fit the chat template: {error}") from error

    def _check_length(self, text: str, max_tokens: int) -> None:
        if self.exceeds(text, max_tokens):
            raise UserError(
                f"the prompt is too long: its {len(text)} characters have more than {max_tokens}"
                " tokens, and no more fit the context: shorten it"
            )

    def exceeds(self, text: str, max_tokens: int) -> bool:
        """Return whether the text certainly has more than `max_tokens` tokens."""
        if len(text) <= max(PIECE_CHARS, max_tokens // 4):  # Short: tokenizing it takes no time.
            return False
        size = len(text.encode()) if self.is_byte_level else len(text)
        return size > max_tokens * self.token_size or self._has_more_tokens(text, max_tokens)

    def _has_more_tokens(self, text: str, max_tokens: int) -> bool:
        """Count the tokens of one piece after the other, until they are too many."""
        tokens = 0
        for start in range(0, len(text), PIECE_CHARS):
            piece = self._encode(text[start : start + PIECE_CHARS], add_special_tokens=False)
            tokens += max(0, len(piece) - PIECE_EXTRA_TOKENS)
            if tokens > max_tokens:
                return True
        return False


def is_plain_byte_level(backend: Any) -> bool:
    """Return whether the tokens of a text always have as many bytes as the text itself.

    Normalizers and tokens that include the space around them shorten texts, and other models have
    a token for any unknown word.
    """
    if backend is None or type(backend.model).__name__ != "BPE":
        return False
    added = backend.get_added_tokens_decoder().values()
    steps = str(backend.pre_tokenizer)
    return (
        str(backend.normalizer) in ("None", "Sequence(normalizers=[])")
        and "ByteLevel" in steps
        and "Whitespace" not in steps
        and 'behavior="Removed"' not in steps
        and not any(token.lstrip or token.rstrip for token in added)
    )
