"""A byte-level tokenizer, like those of most targets, and a tiny pair with a long context."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from peagle.drafter.formats import compact
from tests.support.models.tiny_models import make_drafter, make_target

CONTEXT = 8192
VOCAB_SIZE = 320
TEXTS = ("the quick brown fox jumps over the lazy dog", "        return values[index]\n") * 4


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=alphabet,
        special_tokens=["<pad>", "<eos>", "<user>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = (
        "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}"
        "{% if more %}{{ more }}{% endif %}"
    )
    return fast


def byte_level_folder(root: Path) -> Path:
    """A tiny pair on disk: `target` and `p-eagle`."""
    target = make_target(vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT)
    target.model.save_pretrained(root / "target")
    byte_level_tokenizer().save_pretrained(root / "target")
    target.name = str(root / "target")
    compact.save(make_drafter(target, "p-eagle", 2), root / "p-eagle", target)
    return root
