"""The pre-tokenizer of a byte-level BPE vocabulary: where text is split before merges.

A GGUF file has only the name of a kind, tokenizer.ggml.pre, and transformers does not read it.
"""

import logging
from typing import Any

from tokenizers import Regex, pre_tokenizers

from peagle.target.gguf.header import GGUFHeader

DIGIT_KINDS = ("smollm", "starcoder", "refact", "command-r")  # digits are split one by one
LLAMA3_KINDS = ("llama-bpe", "llama3", "llama-v3", "falcon3")  # up to three digits together
QWEN2_KINDS = ("qwen2", "deepseek-r1-qwen")
GPT2_KINDS = ("gpt-2", "phi-2")  # what transformers assumes for most architectures
KNOWN_KINDS = (*DIGIT_KINDS, *LLAMA3_KINDS, *QWEN2_KINDS, *GPT2_KINDS)
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
log = logging.getLogger(__name__)


def is_byte_level(header: GGUFHeader) -> bool:
    """Whether text is split by a pre-tokenizer: in vocabularies of SentencePiece it is not."""
    return header.metadata.get("tokenizer.ggml.model") == "gpt2"


def correct_splitting(tokenizer: Any, header: GGUFHeader, digits_split: bool) -> None:
    """Give a tokenizer of transformers the pre-tokenizer of the file's vocabulary.

    `digits_split`: split digits in any case, not only if the file says so.
    """
    kind = header.metadata.get("tokenizer.ggml.pre")
    backend = tokenizer.backend_tokenizer
    if digits_split or kind in DIGIT_KINDS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif not is_byte_level(header):
        return
    elif kind in LLAMA3_KINDS:
        backend.pre_tokenizer = split_words("{1,3}")
        backend.model.ignore_merges = True  # a word that is a token needs no merges
    elif kind in QWEN2_KINDS:
        backend.pre_tokenizer = split_words("")
    elif kind in GPT2_KINDS:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)


def split_words(digits: str) -> pre_tokenizers.PreTokenizer:
    """`digits`: the quantifier of the regular expression for digits."""
    words = Regex(WORDS.replace("DIGITS", digits))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def warn_of_splitting(header: GGUFHeader) -> None:
    """Say so if the file's kind of pre-tokenizer is not supported."""
    kind = header.metadata.get("tokenizer.ggml.pre")
    # transformers gives every Qwen model the tokenizer of Qwen2.
    is_qwen = header.architecture.startswith("qwen")
    supported = QWEN2_KINDS if is_qwen else KNOWN_KINDS
    if kind is not None and is_byte_level(header) and kind not in supported:
        log.warning(
            f"{header.path.name}: its pre-tokenizer {kind!r} is not supported for architecture"
            f" {header.architecture!r}: text may be split into other tokens than in training, and"
            " answers may be worse"
        )
