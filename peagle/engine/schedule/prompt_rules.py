"""PromptRules: which prompts an engine accepts."""

from collections.abc import Sequence
from dataclasses import dataclass

from peagle.errors import UserError


@dataclass(frozen=True, slots=True)
class PromptRules:
    context: int  # Tokens of a prompt and its answer.
    vocab_size: int
    setting: str | None = None  # The argument that limits `context`; None: the target does.

    def check(self, ids: Sequence[int]) -> None:
        if not ids:
            raise UserError("the prompt is empty: give at least one token")
        if invalid := [token for token in ids if not 0 <= token < self.vocab_size]:
            raise UserError(
                f"token ids {invalid[:5]} are outside the target's vocabulary of {self.vocab_size}"
            )
        if len(ids) >= self.context:
            raise_limit = f", or raise `{self.setting}`" if self.setting else ""
            raise UserError(
                f"the prompt is too long: it has {len(ids)} tokens, but the context holds"
                f" {self.context} and needs room for an answer: shorten it{raise_limit}"
            )
