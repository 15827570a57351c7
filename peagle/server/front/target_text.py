"""TargetText: what the front has of a target: its tokenizer, and how answers become text."""

from pathlib import Path
from typing import Any, Self

from peagle.engine.detokenizer import Detokenizer, token_decoder
from peagle.errors import UserError
from peagle.server.front.generation_params import GenerationParams
from peagle.server.front.probed_grammars import ProbedGrammars
from peagle.server.messages import TargetInfo
from peagle.server.tokenization.early_tokenizer import EarlyTokenizer
from peagle.server.tokenization.prompt_tokenizer import PromptTokenizer
from peagle.server.tokenization.token_text import TokenTexts


class TargetText:
    def __init__(self, target: TargetInfo, tokenizer: Any) -> None:
        self.tokenizer = PromptTokenizer(tokenizer)
        self.texts = TokenTexts(tokenizer)
        self._target_stop_ids = frozenset(target.stop_ids)
        self.vocab_size = target.engine.vocab_size
        self.grammars = ProbedGrammars(
            target.name, tokenizer, self.vocab_size, self._target_stop_ids
        )
        self._decoder = token_decoder(tokenizer)
        self._special_decoder = token_decoder(tokenizer, skip_special_tokens=False)

    @classmethod
    def load(cls, target: TargetInfo, early: EarlyTokenizer) -> Self:
        tokenizer = early.load(Path(target.folder))
        if tokenizer is None:
            raise UserError(f"target {target.name!r} has no tokenizer in {target.folder}")
        return cls(target, tokenizer)

    def detokenizer(self, params: GenerationParams, room: int) -> Detokenizer:
        """`room`: tokens that the answer may have in the context."""
        min_tokens = min(params.min_tokens, room)
        decoder = self._special_decoder if params.shows_special_tokens else self._decoder
        return Detokenizer(decoder, params.stop, params.include_stop, min_tokens)

    def stop_ids(self, params: GenerationParams) -> frozenset[int]:
        return params.stop_ids | (frozenset() if params.ignore_eos else self._target_stop_ids)
