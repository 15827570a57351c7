"""The detokenizer: pieces join to the text for any steps, and stop strings end answers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from peagle.engine.detokenizer import MAX_WAITING_TOKENS, Detokenizer, token_decoder
from peagle.engine.schedule.request import RequestLimits
from peagle.errors import UserError

TEXT = (
    "Ein Wörterbuch: naïve café, 你好世界, 🙂🙃 und noch mehr. END of it, ENDE. Ein Wort, ein"
    " Wörterbuch!"
)


def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with few merges: most non-ASCII characters have several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=alphabet, special_tokens=["<eos>"]
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Like SentencePiece: the first token loses its space, and unknown characters are bytes."""
    words = ["<unk>", "<eos>", "▁", "▁a", "▁bc", "d", "▁END"] + [
        f"<0x{byte:02X}>" for byte in range(256)
    ]
    tokenizer = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


BYTES, SPACED = byte_level(), sentencepiece_like()
EOS = BYTES.eos_token_id


def ids(text: str) -> list[int]:
    return BYTES(text)["input_ids"]


def blocks(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    cut = []
    while tokens:
        size = sizes[len(cut) % len(sizes)]
        cut.append(tokens[:size])
        tokens = tokens[size:]
    return cut


def stream(words: Detokenizer, parts: list[list[int]]) -> tuple[str, int, bool]:
    """The text, the tokens used, and whether a stop string ended it."""
    text, used = "", 0
    for part in parts:
        pushed = words.push(part)
        text, used = text + pushed.text, used + pushed.tokens_used
        if pushed.stopped:
            return text + words.finish(), used, True
    return text + words.finish(), used, False


sizes = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@settings(max_examples=150)
@given(st.text(st.characters(codec="utf-8") | st.sampled_from("aé你🙂 "), max_size=60), sizes)
def test_the_pieces_join_to_the_text(text: str, sizes: list[int]) -> None:
    tokens = [*ids(text), EOS]
    assert stream(Detokenizer(token_decoder(BYTES)), blocks(tokens, sizes)) == (
        text,
        len(tokens),
        False,
    )


@settings(max_examples=150)
@given(st.lists(st.integers(0, len(BYTES) - 1), max_size=60), sizes)
def test_any_bytes_equal_the_text_of_the_tokenizer(tokens: list[int], sizes: list[int]) -> None:
    expected = BYTES.decode(tokens, skip_special_tokens=True)
    assert stream(Detokenizer(token_decoder(BYTES)), blocks(tokens, sizes)) == (
        expected,
        len(tokens),
        False,
    )


@settings(max_examples=100)
@given(st.lists(st.sampled_from(["a", "bc", "d", "space", "eos", "你", "é"]), max_size=30), sizes)
def test_spaces_of_first_tokens_are_kept(words: list[str], sizes: list[int]) -> None:
    known = {"a": [3], "bc": [4], "d": [5], "space": [2], "eos": [1]}
    tokens = [i for word in words for i in known.get(word, [7 + byte for byte in word.encode()])]
    assert stream(Detokenizer(token_decoder(SPACED)), blocks(tokens, sizes))[0] == SPACED.decode(
        tokens, skip_special_tokens=True
    )


def test_incomplete_characters_wait() -> None:
    words, tokens = Detokenizer(token_decoder(BYTES)), ids("é🙂")
    assert len(tokens) > 2, "the test needs characters of several tokens"
    shown = [words.push([token]).text for token in tokens]
    assert "".join(shown) == "é🙂" and all(piece in ("", "é", "🙂") for piece in shown)
    cut = Detokenizer(token_decoder(BYTES))
    assert cut.push(tokens[:-1]).text == "é" and cut.finish() == BYTES.decode(tokens[:-1])[1:]


@settings(max_examples=200)
@given(
    sizes,
    st.sampled_from(
        [["END"], ["café, 你"], ["ENDE", "END of it"], ["🙂"], [" mehr. E", "h"], ["nope"]]
    ),
)
def test_a_stop_string_ends_the_answer_for_any_steps(sizes: list[int], stop: list[str]) -> None:
    tokens = ids(TEXT)
    end, start = (
        min((TEXT.find(s) + len(s), TEXT.find(s)) for s in stop)
        if "nope" not in stop
        else (len(TEXT),) * 2
    )
    detokenizer = Detokenizer(token_decoder(BYTES), stop)
    text, used, stopped = stream(detokenizer, blocks(tokens, sizes))
    assert (text, stopped) == (TEXT[:start], "nope" not in stop)
    assert detokenizer.stop_string == (TEXT[start:end] if stopped else None)
    assert (
        stream(Detokenizer(token_decoder(BYTES), stop, include_stop=True), blocks(tokens, sizes))[0]
        == TEXT[:end]
    )
    needed = (
        n for n in range(len(tokens) + 1) if len(BYTES.decode(tokens[:n]).rstrip("\ufffd")) >= end
    )
    assert used == next(needed)


def test_a_partial_stop_string_is_not_shown() -> None:
    words = Detokenizer(token_decoder(BYTES), ["STOP"])
    assert words.push(ids("see ST")).text == "see "
    assert words.push(ids("S")).text == "ST"
    assert words.push(ids("TO")).text == ""
    assert words.finish() == "STO"


def test_a_stop_string_across_steps_is_never_shown() -> None:
    words = Detokenizer(token_decoder(BYTES), ["STOP"])
    assert words.push(ids("see ST"))[:2] == ("see ", False)
    assert words.push([*ids("OP"), *ids(" more")]) == ("", True, len(ids("OP")))
    assert words.push(ids("more")) == ("", True, 0) and words.finish() == ""


@pytest.mark.parametrize("size", [1, 2, 7, 50])
def test_the_first_tokens_cannot_end_the_answer(size: int) -> None:
    first, rest = ids("one STOP two ST"), ids("OP three STOP four")
    words = Detokenizer(token_decoder(BYTES), ["STOP"], min_tokens=len(first))
    assert stream(words, blocks(first + rest, [size]))[::2] == ("one STOP two STOP three ", True)


def test_only_a_window_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a step does not grow with the answer, even if steps end within characters."""
    seen = []
    decode = Detokenizer._decode
    monkeypatch.setattr(
        Detokenizer, "_decode", lambda self, ids: seen.append(len(ids)) or decode(self, ids)
    )
    for text, size in (("word " * 400, 3), ("你" * 400, 2), ("🙂" * 400, 3)):
        raw = [
            BYTES.convert_tokens_to_ids(c)
            for c in BYTES.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)[0][0]
        ]
        tokens = ids(text) if text.isascii() else raw
        assert stream(Detokenizer(token_decoder(BYTES)), blocks(tokens[1:], [size]))[
            0
        ] == BYTES.decode(tokens[1:])
        assert max(seen) <= 2 * MAX_WAITING_TOKENS + 8
    invalid = Detokenizer(token_decoder(BYTES))
    for _ in range(1000):
        invalid.push(raw[1:2])  # a byte that starts no character
    assert max(seen) <= 2 * MAX_WAITING_TOKENS + 8


def test_without_a_tokenizer_there_is_no_text() -> None:
    words = Detokenizer(None)
    assert words.push([1, 2, 3]) == ("", False, 3) and words.finish() == ""
    with pytest.raises(UserError, match="tokenizer"):
        Detokenizer(None, ["x"])
    with pytest.raises(UserError, match="empty"):
        RequestLimits(1, stop=("",))
    with pytest.raises(AssertionError, match="empty"):
        Detokenizer(token_decoder(BYTES), [""])


def with_decoder(*steps: decoders.Decoder, added: str = "") -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(list(steps))
    if added:
        tokenizer.add_tokens([added])
    return tokenizer


BYTE, REPLACE = decoders.ByteLevel(), decoders.Replace("▁", " ")
GGUF = decoders.ByteFallback(), decoders.Fuse(), REPLACE, BYTE


@pytest.mark.parametrize("added", ["", "<call>"])
def test_a_tokenizer_of_a_gguf_file(added: str) -> None:
    tokenizer = with_decoder(*GGUF, added=added)
    decoder, tokens = token_decoder(tokenizer), tokenizer(TEXT + added)["input_ids"]
    assert decoder.context_free and stream(Detokenizer(decoder), blocks(tokens, [3, 1]))[
        0
    ] == tokenizer.decode(tokens)


@pytest.mark.parametrize(
    "tokenizer",
    [
        SPACED,
        with_decoder(BYTE, decoders.Replace(" .", ".")),
        with_decoder(BYTE, decoders.ByteFallback()),
        with_decoder(BYTE, decoders.Strip(" ", 1, 0)),
        with_decoder(*GGUF, added="<a call>"),
    ],
)
def test_other_decoders_keep_the_context_of_tokens(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    decoder = token_decoder(tokenizer)
    assert not decoder.context_free
    tokens = tokenizer("a . bc END")["input_ids"]
    assert decoder.decode(tokens) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_custom_decoder() -> None:
    class UpperCase:
        def decode_chain(self, tokens: list[str]) -> list[str]:
            return [token.upper() for token in tokens]

    tokenizer = byte_level()
    tokenizer.backend_tokenizer.decoder = decoders.Decoder.custom(UpperCase())
    decoder = token_decoder(tokenizer)
    assert not decoder.context_free and decoder.decode(ids("abc")) == "ABC"
