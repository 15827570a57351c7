"""Long prompts are refused before they are tokenized whole, and delay no short ones."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from peagle.errors import UserError
from peagle.server.front.engine_backend import EngineBackend
from peagle.server.http.errors import ApiError
from peagle.server.tokenization.prompt_tokenizer import PIECE_CHARS, PromptTokenizer
from peagle.server.tokenization.tokenizer_threads import SHORT_CHARS, TokenizerThreads
from tests.support.models.byte_level import byte_level_tokenizer
from tests.support.server.serving import HELLO, ask, served, word_tokenizer

EMOJI = "\U0001f600"
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


class CountedTokenizer(PromptTokenizer):
    """Counts the characters that are tokenized."""

    characters = 0

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.characters += len(text)
        return super()._encode(text, add_special_tokens)


def test_a_text_with_too_many_bytes_is_not_tokenized() -> None:
    tokenizer = CountedTokenizer(byte_level_tokenizer())
    assert tokenizer.is_byte_level and tokenizer.token_size < 32
    with pytest.raises(UserError, match="1000000 characters"):
        tokenizer.encode(EMOJI * 1_000_000, 8192)
    assert tokenizer.characters == 0


def test_tokenizing_stops_when_the_tokens_are_too_many() -> None:
    tokenizer = CountedTokenizer(byte_level_tokenizer())
    text = "xyz" * (PIECE_CHARS * 4)
    assert len(text) < 50_000 * tokenizer.token_size
    with pytest.raises(UserError, match="shorten"):
        tokenizer.encode(text, 50_000)
    assert tokenizer.characters <= 4 * PIECE_CHARS < len(text)


@pytest.mark.parametrize("make", [byte_level_tokenizer, word_tokenizer])
def test_a_text_that_fits_is_never_refused(make: Any) -> None:
    tokenizer = PromptTokenizer(make())
    for word in ("the quick brown fox ", EMOJI, "x", " ", "w6 ", "w", "\n"):
        text = word * (3 * PIECE_CHARS // len(word))
        ids = tokenizer.tokenizer(text)["input_ids"]
        context = max(len(ids), 512)  # One unknown token may represent any word.
        assert not tokenizer.exceeds(text, context)
        assert tokenizer.encode(text, context) == ids


@pytest.mark.parametrize("make", [byte_level_tokenizer, word_tokenizer])
def test_messages_are_tokenized_with_the_template(make: Any) -> None:
    tokenizer = PromptTokenizer(make())
    for kwargs in ({}, {"more": "w9 fox"}):
        expected = tokenizer.tokenizer.apply_chat_template(
            MESSAGES, add_generation_prompt=True, **kwargs
        )["input_ids"]
        assert tokenizer.encode_chat(MESSAGES, kwargs, 256).ids == expected


def test_template_arguments_count_towards_the_limit() -> None:
    tokenizer = CountedTokenizer(byte_level_tokenizer())
    with pytest.raises(UserError, match="shorten"):
        tokenizer.encode_chat(MESSAGES, {"more": EMOJI * 1_000_000}, 8192)
    assert tokenizer.characters == 0


def test_threads_share_a_tokenizer() -> None:
    """A tokenizer saved with truncation would be changed by every call: `Already borrowed`."""
    raw = byte_level_tokenizer()
    raw.backend_tokenizer.enable_truncation(4)
    tokenizer = PromptTokenizer(raw)
    text = "the quick brown fox " * 400
    expected = tokenizer.encode(text, 8192)
    assert len(expected) > 400
    with ThreadPoolExecutor(4) as threads:
        assert all(
            ids == expected for ids in threads.map(tokenizer.encode, [text] * 64, [8192] * 64)
        )


def test_long_texts_do_not_delay_short_ones() -> None:
    async def main() -> None:
        threads = TokenizerThreads(max_waiting=8)
        release = threading.Event()
        long = [asyncio.create_task(threads.run(SHORT_CHARS + 1, release.wait)) for _ in range(8)]
        counted = [
            asyncio.create_task(threads.run(SHORT_CHARS + 1, release.wait, is_prompt=False))
            for _ in range(8)
        ]
        try:
            await asyncio.sleep(0)
            async with asyncio.timeout(60):
                assert await threads.run(5, lambda: "short") == "short"
            with pytest.raises(ApiError) as refused:
                await threads.run(SHORT_CHARS + 1, release.wait)
            assert refused.value.status == 429
        finally:
            release.set()
            await asyncio.gather(*long, *counted)
            threads.close()

    asyncio.run(main())


def test_long_prompts_are_refused_by_every_endpoint() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        long = "w6 " * 20_000  # The context has 256 tokens.
        for path, body in (
            ("/v1/completions", {"prompt": long}),
            ("/v1/completions", {"prompt": ["w6", long]}),
            ("/v1/completions", {"prompt": [6] * 300_000, "echo": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
            ("/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": {"more": long}}),
        ):
            response = await client.post(path, json=body)
            assert response.status_code == 400, response.text
            assert "context" in response.json()["error"]["message"]
        counted = await client.post("/tokenize", json={"prompt": long, "return_token_strs": True})
        assert counted.json()["count"] == 20_000
        decoded = await client.post("/detokenize", json={"tokens": [6] * 20_000})
        assert decoded.json()["prompt"].count("w6") == 20_000
        refused = await client.post("/tokenize", json={"prompt": "w6 " * 3_000_000})
        assert refused.status_code == 400
        await ask(client)

    served(test)
