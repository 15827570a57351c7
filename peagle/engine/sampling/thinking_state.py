"""ThinkingState: how far an answer has come in its thinking part, and the grammar that follows.

    undecided -> thinking -> forced -> answer

An answer is undecided until its first tokens are the start marker, or not. Thinking ends with an
end marker. Once it has as many tokens as its budget, the tokens of `forced_end` are forced. A row
of a step is masked by the phase after the emitted tokens and the drafts before the row, as with
grammars (grammar_masks.py), so the answer is the same with and without drafts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from peagle.engine.sampling.grammar_masks import GrammarState
from peagle.engine.thinking import Thinking

Phase = Literal["undecided", "thinking", "forced", "answer"]


@dataclass(frozen=True, slots=True)
class ThinkingPosition:
    phase: Phase
    text: str = ""  # The end of the thinking part, or all text of an undecided answer.
    token_count: int = 0  # Tokens of the thinking part.
    forced: tuple[int, ...] = ()  # Tokens that must follow.
    phase_after: Phase = "answer"  # Where the forced tokens lead to.


ANSWER = ThinkingPosition("answer")


class ThinkingState:
    """Where the grammar binds, `grammar` is its state; None: the answer is free."""

    def __init__(
        self,
        thinking: Thinking,
        token_text: Callable[[int], str],
        grammar: GrammarState | None,
        stop_ids: Sequence[int],
    ) -> None:
        self.thinking = thinking
        self.grammar = grammar
        self._token_text = token_text
        self._stop_ids = stop_ids
        self._tail_chars = max(map(len, thinking.ends)) - 1
        self.position = ThinkingPosition("undecided")
        if thinking.starts_inside:
            self.position = self._enter_thinking()

    @property
    def is_over(self) -> bool:
        """Whether nothing is bound any more."""
        return self.position.phase == "answer" and self.grammar is None

    @property
    def terminated(self) -> bool:
        return self.grammar is not None and self.grammar.terminated

    @property
    def error(self) -> str:
        return "" if self.grammar is None else self.grammar.error

    def consume(self, tokens: Sequence[int]) -> int:
        """Advance by the tokens; returns how many of them belong to the answer."""
        for used, token in enumerate(tokens):
            if self._begins_answer(token):
                self.position = ANSWER
                if self.grammar is None:
                    break
                return used + self.grammar.consume(tokens[used:])
            self.position = self._advance(self.position, token)
            if self.grammar is not None:
                self.grammar.token_count += 1
        return len(tokens)

    def fill_rows(self, masks: Tensor, drafts: Sequence[int]) -> int | None:
        """Fill masks [R, words] of the rows before the answer, given the R - 1 drafts.

        Returns the row where the grammar begins; None: it does not begin in these rows, or there
        is none.
        """
        position = self.position
        if position.phase == "undecided" and self.grammar is not None:
            assert len(masks) == 1, "the first token of an answer comes from its prefill"
            return 0
        for row, mask in enumerate(masks):
            if position.phase == "answer":
                return row if self.grammar is not None else None
            self._mask_row(position, mask)
            if row == len(drafts) or (position.forced and drafts[row] != position.forced[0]):
                return None
            position = self._advance(position, drafts[row])
        return None

    def allow_start(self, mask: Tensor) -> None:
        """Add the first token of the start marker to the mask of the grammar's first row."""
        if self.position.phase == "undecided":
            set_bit(mask, self.thinking.start_ids[0])

    def _mask_row(self, position: ThinkingPosition, mask: Tensor) -> None:
        if position.forced:
            mask.zero_()
            set_bit(mask, position.forced[0])
        elif self.grammar is not None:  # What it binds must not be left out.
            clear_bits(mask, self._stop_ids)

    def _begins_answer(self, token: int) -> bool:
        if self.position.phase == "answer":
            return True
        if self.position.phase != "undecided" or self.grammar is None:
            return False
        return token != self.thinking.start_ids[0] or self.grammar.allows(token)

    def _advance(self, position: ThinkingPosition, token: int) -> ThinkingPosition:
        """The position after a token that does not belong to the answer."""
        if position.forced:
            rest = position.forced[1:]
            if rest:
                return replace(position, forced=rest)
            return self._enter_thinking() if position.phase_after == "thinking" else ANSWER
        if position.phase == "undecided":
            return self._decide(position, token)
        if position.phase == "answer":
            return position
        text = position.text + self._token_text(token)
        if any(end in text for end in self.thinking.ends):
            return ANSWER
        count = position.token_count + 1
        return self._limit(
            ThinkingPosition("thinking", text[max(0, len(text) - self._tail_chars) :], count)
        )

    def _decide(self, position: ThinkingPosition, token: int) -> ThinkingPosition:
        start = self.thinking.start
        if self.grammar is not None:
            rest = self.thinking.start_ids[1:]
            forced = ThinkingPosition("forced", forced=rest, phase_after="thinking")
            return forced if rest else self._enter_thinking()
        text = (position.text + self._token_text(token)).lstrip()
        if text.startswith(start):
            return self._enter_thinking()
        return ThinkingPosition("undecided", text) if start.startswith(text) else ANSWER

    def _enter_thinking(self) -> ThinkingPosition:
        return self._limit(ThinkingPosition("thinking"))

    def _limit(self, position: ThinkingPosition) -> ThinkingPosition:
        budget = self.thinking.budget
        if budget is None or position.token_count < budget:
            return position
        return ThinkingPosition("forced", forced=self.thinking.forced_end)


def set_bit(mask: Tensor, token: int) -> None:
    """Allow a token in a mask [words] int32."""
    mask.view(torch.uint8)[token // 8] |= 1 << token % 8


def clear_bits(mask: Tensor, tokens: Sequence[int]) -> None:
    """Forbid tokens in a mask [words] int32."""
    mask_bytes = mask.view(torch.uint8)
    for token in tokens:
        if token // 8 < len(mask_bytes):
            mask_bytes[token // 8] &= 255 ^ 1 << token % 8
