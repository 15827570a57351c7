"""A web server process tokenizes without torch, with the same result as with torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import CTRLTokenizer

from peagle.server.settings import ServerSettings
from peagle.server.tokenization import early_tokenizer
from peagle.server.tokenization.early_tokenizer import EarlyTokenizer
from peagle.target.tokenizer import load_tokenizer_without_torch
from tests.support.models.byte_level import byte_level_tokenizer
from tests.support.server.front_text import SENTENCE, front_text
from tests.support.server.serving import tiny_folder, word_tokenizer

# Loads a tokenizer, which fails if transformers does not find torch.
NEEDS_TORCH = """
import sys
from pathlib import Path
from peagle.target.tokenizer import import_without_torch, load_tokenizer_without_torch

import_without_torch()
import transformers

def refuse(*args, **options):
    raise ImportError("it needs torch")

assert not transformers.utils.is_torch_available() and "torch" not in sys.modules
transformers.AutoTokenizer.from_pretrained = refuse
tokenizer = load_tokenizer_without_torch(Path(sys.argv[1]))
print(tokenizer("w6 w9")["input_ids"], "torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Tokenizers of words and bytes, and one implemented in Python."""
    root = tmp_path_factory.mktemp("tokenizers")
    word_tokenizer().save_pretrained(root / "words")
    byte_level_tokenizer().save_pretrained(root / "bytes")
    program = CTRLTokenizer(*program_files(root))
    program.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    program.save_pretrained(root / "program")
    return [root / "words", root / "bytes", root / "program"]


def program_files(root: Path) -> tuple[str, str]:
    """Vocabulary and merges of a tokenizer with one token for each word."""
    words = ["<unk>", *SENTENCE.split()]
    vocabulary = root / "vocab.json"
    vocabulary.write_text(json.dumps({word: i for i, word in enumerate(words)}))
    merges = root / "merges.txt"
    merges.write_text("#version: 0.2\nw 6</w>\nw 9</w>\n")
    return str(vocabulary), str(merges)


def run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    return result.stdout


def test_the_same_text_without_torch(folders: list[Path]) -> None:
    printed: dict[str, Any] = json.loads(
        run("-m", "tests.support.server.front_text", *map(str, folders))
    )
    assert printed["texts"] == [front_text(folder) for folder in folders]
    assert [text["class"] for text in printed["texts"]][-1] == "CTRLTokenizer"
    assert printed["torch"] is False


def test_a_tokenizer_that_needs_torch(folders: list[Path]) -> None:
    assert run("-c", NEEDS_TORCH, str(folders[0])) == "[6, 9] True\n"


def test_a_preloaded_tokenizer_is_checked_against_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may load another folder than expected, or new files after a restart."""
    loaded: list[Path] = []

    def load(folder: Path) -> Any:
        loaded.append(folder)
        return load_tokenizer_without_torch(folder)

    monkeypatch.setattr(early_tokenizer, "load_tokenizer_without_torch", load)
    for name in ("expected", "other"):
        tiny_folder(tmp_path / name)
    expected = tmp_path / "expected" / "target"
    early = EarlyTokenizer(ServerSettings(pair=str(expected)))
    early.start()
    first = early.load(expected.resolve())
    assert first is not None and loaded == [expected.resolve()]
    assert early.load(expected.resolve()) is not first
    assert loaded == [expected.resolve()] * 2
    early = EarlyTokenizer(ServerSettings(pair=str(expected)))
    early.start()
    other = tmp_path / "other" / "target"
    assert early.load(other) is not None and loaded[-1] == other
    missing = EarlyTokenizer(ServerSettings(pair=str(tmp_path / "missing")))
    missing.start()
    assert missing.load(tmp_path / "missing") is None
