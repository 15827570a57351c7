"""Grammars: how far each answer has come in its grammar, and which tokens a row of a step allows.

The mask of row i is that of the grammar after the emitted tokens and the drafts before row i. The
rest of a step sees only masked logits, so a draft outside the grammar is never the target's token
and is rejected; the rows after it are not used, and not masked. The host must know what was emitted
and drafted: a step with such a request is read back at once, and its masks are computed while the
target's pass runs.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from peagle.engine.device import to_device
from peagle.grammar import CompiledGrammar
from peagle.grammar.matcher import clean_error_text

if TYPE_CHECKING:
    from llguidance import LLExecutor


class AnswerConstraint(Protocol):
    """What binds the tokens of one request, and how far its answer has come in it."""

    @property
    def grammar(self) -> "GrammarState | None": ...

    @property
    def is_over(self) -> bool:
        """Whether nothing is bound any more."""

    @property
    def terminated(self) -> bool:
        """Whether nothing can follow."""

    @property
    def error(self) -> str:
        """Why the grammar rejected a token."""

    def consume(self, tokens: Sequence[int]) -> int:
        """Advance by the tokens; returns how many of them belong to the answer."""

    def fill_rows(self, masks: Tensor, drafts: Sequence[int]) -> int | None:
        """Fill masks [R, words] of rows before the grammar's; returns its first row, if any."""

    def allow_start(self, mask: Tensor) -> None:
        """Complete the mask of the grammar's first row."""


class GrammarState:
    """The grammar of one request, and how far its answer has come in it."""

    def __init__(
        self,
        compiled: CompiledGrammar,
        executor: "LLExecutor",
        stop_ids: Collection[int],
        min_tokens: int,
    ) -> None:
        self.compiled = compiled  # Its memory is accounted for as long as a request holds it.
        self.matcher = compiled.new_matcher()
        self.executor = executor
        self.stop_ids = sorted(stop_ids)
        self.min_tokens = min_tokens
        self.token_count = 0
        self.terminated = False  # nothing can follow
        self.error = ""  # why the grammar rejected a token
        self.is_over = False  # It binds until the end.

    @property
    def grammar(self) -> "GrammarState":
        return self

    def fill_rows(self, masks: Tensor, drafts: Sequence[int]) -> int:
        return 0

    def allow_start(self, mask: Tensor) -> None:
        pass

    def consume(self, tokens: Sequence[int]) -> int:
        """Advance by the tokens; returns how many of them belong to the answer.

        All of them, or those up to the one after which nothing can follow.
        """
        for count, token in enumerate(tokens, 1):
            if not self.matcher.consume_token(token):
                self.error = clean_error_text(self.matcher.get_error())
            self.terminated = self.matcher.is_stopped()
            if self.terminated:
                return count
        self.token_count += len(tokens)
        return len(tokens)

    def allows(self, token: int) -> bool:
        return bool(self.matcher.validate_tokens([token]))

    def forbid_early_stops(self, masks: Tensor, tokens_before: int = 0) -> None:
        """Remove stop tokens before `min_tokens` from masks [R, words], row by row.

        A row that allows nothing but stop tokens keeps them. `tokens_before`: drafts before the
        first of these rows.
        """
        early_rows = max(0, self.min_tokens - self.token_count - tokens_before)
        for mask in masks[:early_rows].view(torch.uint8):
            others = mask.clone()
            for stop in (stop for stop in self.stop_ids if stop // 8 < len(mask)):
                others[stop // 8] &= 255 ^ 1 << stop % 8
            if others.any():
                mask.copy_(others)


class GrammarMasks:
    """The masks of one pass, for those of its requests that have a constraint."""

    def __init__(self, members: list[tuple[int, AnswerConstraint]]) -> None:
        """`members`: (row of the batch, constraint) of each such request."""
        self.rows = [row for row, _ in members]
        self.states = [state for _, state in members]

    def apply(self, logits: Tensor, drafts: list[list[int]]) -> None:
        """Mask logits [B, R, V] in place; drafts: R - 1 of each request of the batch."""
        vocab = logits.shape[-1]
        rows = to_device(torch.tensor(self.rows), logits.device)
        bitmask = self._fill_bitmask([drafts[row] for row in self.rows], vocab)
        bitmask = to_device(bitmask, logits.device)
        logits[rows] = logits[rows].masked_fill(~unpack_bitmask(bitmask, vocab), -torch.inf)

    def _fill_bitmask(self, drafts: list[list[int]], vocab: int) -> Tensor:
        """[n, R, words] int32, one bit per token.

        Rows after a draft that the grammar rejects allow everything.
        """
        # The torch version of this module loads torch's compiler, which takes seconds.
        from llguidance.numpy import fill_next_token_bitmask_par as fill
        from llguidance.numpy import fill_next_token_bitmask_par_with_draft_tokens as fill_drafted

        rows = len(drafts[0]) + 1
        masks = torch.full((len(drafts), rows, -(-vocab // 32)), -1, dtype=torch.int32)
        bound = [
            (i, first, state.grammar)
            for i, state in enumerate(self.states)
            if (first := state.fill_rows(masks[i], drafts[i])) is not None and state.grammar
        ]
        if not bound:
            return masks
        executor = bound[0][2].executor
        if rows == 1:
            fill(executor, [(grammar.matcher, i) for i, _, grammar in bound], masks[:, 0].numpy())
        else:
            with_drafts = [
                (grammar.matcher, rows * i + first, drafts[i][first:])
                for i, first, grammar in bound
            ]
            fill_drafted(executor, with_drafts, masks.flatten(0, 1).numpy())
        for i, first, grammar in bound:
            self.states[i].allow_start(masks[i, first])
            grammar.forbid_early_stops(masks[i, first:], first)
        return masks


def unpack_bitmask(masks: Tensor, vocab: int) -> Tensor:
    """[..., words] int32 -> [..., vocab] bool.

    Words are little-endian, as on every machine that PyTorch runs on.
    """
    bits = torch.arange(8, dtype=torch.uint8, device=masks.device)
    return (masks.view(torch.uint8)[..., None] >> bits & 1).bool().flatten(-2)[..., :vocab]
