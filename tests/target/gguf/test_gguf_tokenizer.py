"""Metadata of the vocabulary in GGUF files that transformers does not read."""

import logging
from pathlib import Path

import pytest
import torch

from peagle.target import Target, load_target
from tests.support.models.byte_level import byte_level_tokenizer
from tests.support.models.gguf_files import VOCAB_SIZE, TinyGGUF

TEXT = "Year 12345 isn't\n\n  DON'T!?"
START = ["Year"]
LLAMA3 = [*START, " ", "123", "45", " isn", "'t", "\n\n", " ", " DON", "'T", "!?"]
SPLITS = {
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "qwen2": [*START, " ", *"12345", " isn", "'t", "\n\n", " ", " DON", "'T", "!?"],
    "gpt-2": [*START, " 12345", " isn", "'t", "\n\n ", " DON", "'", "T", "!?"],
    "smollm": [*START, " ", *"12345", " isn", "'t", "\n\n ", " DON", "'", "T", "!?"],
}


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))


def load(file: TinyGGUF) -> Target:
    return load_target(file.write(), torch.float32, "cpu", stored=True)


@pytest.mark.parametrize(
    ("kind", "architecture"), [*((kind, "llama") for kind in SPLITS), ("qwen2", "qwen2")]
)
def test_text_is_split_by_the_rule_of_the_file(
    tmp_path: Path, kind: str, architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = TinyGGUF(tmp_path / "m.gguf", architecture, tokenizer=byte_level_tokenizer())
    file.entries["tokenizer.ggml.pre"] = kind
    with caplog.at_level(logging.WARNING, "peagle"):
        tokenizer = load(file).tokenizer
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[start:end] for _, (start, end) in pieces] == SPLITS[kind]
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"], skip_special_tokens=True) == TEXT
    assert not caplog.records


@pytest.mark.parametrize(("kind", "architecture"), [("novel", "llama"), ("gpt-2", "qwen2")])
def test_other_kinds_of_splitting_are_reported(
    tmp_path: Path, kind: str, architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = TinyGGUF(tmp_path / "m.gguf", architecture, tokenizer=byte_level_tokenizer())
    file.entries["tokenizer.ggml.pre"] = kind
    for _ in range(2):  # A second load, with config and tokenizer in the cache, reports it again.
        caplog.clear()
        with caplog.at_level(logging.WARNING, "peagle"):
            load(file)
        (line,) = [record.message for record in caplog.records]
        assert line.startswith(f"m.gguf: its pre-tokenizer {kind!r} is not supported")


def test_tokens_that_end_a_turn_are_stop_tokens(tmp_path: Path) -> None:
    file = TinyGGUF(tmp_path / "m.gguf")
    assert load(file).stop_ids == {1}
    file.entries = {
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": VOCAB_SIZE,  # Not a token.
    }
    assert load(file).stop_ids == {1, 5}
    file.entries["tokenizer.ggml.eom_token_id"] = 7
    assert load(file).stop_ids == {1, 5, 7}
