"""Random answers that follow a grammar of tool calls, and a check whether a text follows it."""

import random
from collections.abc import Mapping
from functools import cache

from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from peagle.grammar import Grammar
from peagle.grammar.matcher import build_matcher, try_answer
from peagle.server.parsing.formats import harmony, mistral

EOS = "<eos>"
HARMONY = tuple(harmony.HarmonyFormat.markers[:5])
MISTRAL = (mistral.START, mistral.ARGS)
TAGS = ("<tool_call>", "</tool_call>")
# Tokens of several characters: random answers end sooner, and tokens split markers.
LONG = ('"}', "Ċ</", "parameter>Ċ", "}Ċ", "<tool", "_call>Ċ", "Ċ</parameter>Ċ", "[TOOL", "<|ch")
MAX_TOKENS = 600


class WalkTokenizer:
    def __init__(self, added: tuple[str, ...]) -> None:
        """`added` are special tokens, except the tags, which are not special for any target."""
        alphabet = [char for char in sorted(pre_tokenizers.ByteLevel.alphabet()) if char < "\x7f"]
        tokens = [EOS, *added, *alphabet, "Ċ", "Ġ", *LONG]
        model = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        special = [token for token in added if token not in TAGS]
        model.add_special_tokens([AddedToken(token, special=True) for token in (EOS, *special)])
        model.add_tokens([AddedToken(token, special=False) for token in added if token in TAGS])
        self.tokenizer = model
        self.added_tokens: Mapping[str, int] = {token: i + 1 for i, token in enumerate(added)}
        self.texts = [token.replace("Ċ", "\n").replace("Ġ", " ") for token in tokens]
        self.matcher_tokenizer = LLTokenizer(model.to_str(), n_vocab=len(tokens), eos_token=[0])

    def accepts(self, grammar: Grammar, text: str) -> bool:
        matcher = build_matcher(self.matcher_tokenizer, grammar)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def walk(self, grammar: Grammar, dice: random.Random, begin: str = "") -> str | None:
        """A random answer that begins with this text, or None if it becomes too long."""
        matcher = build_matcher(self.matcher_tokenizer, grammar)
        try_answer(matcher, self.matcher_tokenizer, (0,))
        assert matcher.consume_tokens(self.tokenizer.encode(begin, add_special_tokens=False).ids)
        text = begin
        for _ in range(MAX_TOKENS):
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            allowed = [i for i in range(len(self.texts)) if mask >> i & 1]
            ends = [i for i in allowed if i == 0 or self.texts[i][-1] in '"}]>;\n']
            token = dice.choice(ends if ends and dice.random() < 0.5 else allowed)
            if token == 0:
                return text
            assert matcher.consume_token(token), matcher.get_error()
            text += self.texts[token]
        return None


@cache
def walk_tokenizer(added: tuple[str, ...]) -> WalkTokenizer:
    return WalkTokenizer(added)
