"""Grammars, and pairs whose tokenizers have their characters."""

from functools import cache
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle.core import Method
from peagle.drafter import Drafter
from peagle.drafter.formats import compact
from peagle.grammar import Grammar
from peagle.loaded import LoadedPair
from peagle.target import Target
from tests.support.engine.engines import pair_of, small
from tests.support.models.tiny_models import make_drafter, make_target

SPECIAL = ("<pad>", "<eos>", "<bos>")
LONG = (
    '{"',
    '":',
    '",',
    '"}',
    "true",
    "false",
    "null",
    "[]",
    "{}",
    '":"',
    "ab",
    "na",
    "name",
    "ag",
    "bb",
    "12",
    "ok",
)
VOCAB = [*SPECIAL, *'{}[]":,-.\\_', "Ġ", "Ċ", *digits, *ascii_lowercase, *LONG, *ascii_uppercase][
    :96
]
# Otherwise random targets generate mostly whitespace.
COMPACT = {"x-guidance": {"whitespace_pattern": " "}}
BOB: dict[str, Any] = COMPACT | {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {
            "type": "array",
            "items": {"enum": ["ab", "bb", "ok"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def letters() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 96 tokens: the characters of JSON, and some longer tokens."""
    model = Tokenizer(models.BPE({token: i for i, token in enumerate(VOCAB)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<eos>", bos_token="<bos>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


@cache
def bound_pair(device: str = "cpu") -> LoadedPair:
    target = Target(make_target(seed=3, num_hidden_layers=7).model.to(device), letters(), "tiny")
    drafters: dict[Method, Drafter] = {
        "p-eagle": make_drafter(target, "p-eagle", 1),
        "eagle3": make_drafter(target, "eagle3", 1),
    }
    return pair_of(target, drafters)


def bound_folder(root: Path) -> Path:
    """Save a target with the same tokenizer and a drafter: `target` and `p-eagle`."""
    target = make_target(seed=3, num_hidden_layers=7)
    target.model.save_pretrained(root / "target")
    letters().save_pretrained(root / "target")
    target.name = str(root / "target")
    compact.save(make_drafter(target, "p-eagle", 1), root / "p-eagle", target)
    return root


# The parser accepts the start of its text, but reaches its item limit later.
LATE = Grammar.json(
    COMPACT
    | {
        "type": "array",
        "minItems": 26,
        "maxItems": 26,
        "prefixItems": [{"const": 12}] * 25,
        "items": {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}},
    }
)

# Short answers of all kinds, for any tiny target with the tokenizer `letters` (fuzzing).
FUZZ_GRAMMARS = (
    Grammar.regex("[ab]{2,9}"),
    Grammar.regex("(ok|na){1,6}[0-9]{1,3}"),
    Grammar.choice(["yes", "no", "nobody", "name"]),
    Grammar.ebnf('root ::= "[" item ("," item){0,4} "]"\nitem ::= "ab" | "bb" | "12"'),
    Grammar.ebnf('root ::= "ab" | "(" root ")"'),
    Grammar.json(
        COMPACT | {"type": "array", "items": {"enum": ["ok", 12]}, "minItems": 1, "maxItems": 3}
    ),
    Grammar.json(
        COMPACT
        | {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["a"],
            "additionalProperties": False,
        }
    ),
)


def spelling_target(name: str = "llama", seed: int = 0) -> Target:
    """A tiny random target of an architecture with the tokenizer `letters`.

    Other tests have a word-level tokenizer, but llguidance needs the bytes of each token.
    """
    target = make_target(name, seed)
    target.tokenizer = letters()
    return target


def small_with_letters() -> LoadedPair:
    """The pair `small`, with trained drafters and the tokenizer `letters`."""
    return pair_of(Target(small().target.model, letters(), "tiny"), small()._drafters)
