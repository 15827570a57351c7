"""Runs commands in process, and saves a tiny pair for them."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from peagle.cli import app
from peagle.drafter.formats import compact
from tests.support.models.tiny_models import MASK, make_drafter, make_target


def run(*args: object, code: int = 0) -> str:
    """Run a command and check its exit code; return stdout, or stderr of a failing command."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output + result.stderr + repr(result.exception)
    return result.stdout if code == 0 else result.stderr


def save_tiny_pair(root: Path) -> Path:
    """Save a chat target, two drafters, and a drafter that does not fit the target."""
    target = make_target()
    target.model.save_pretrained(root / "target")
    vocab = {f"w{i}": i for i in range(94) if i != MASK} | {"<user>": 94, "<unk>": 95}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="w1")
    tokenizer.chat_template = "{% for m in messages %}<user> {{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(root / "target")
    target.name = str(root / "target")
    compact.save(make_drafter(target, "p-eagle", 2), root / "p-eagle", target)
    compact.save(make_drafter(target, "eagle3", 1), root / "eagle3", target)
    other = make_target(hidden_size=64)
    compact.save(make_drafter(other, "p-eagle", 1), root / "misfit", other)
    return root
