"""Answers bound to a grammar: how far each has come in it, and which tokens it allows at every row of a step.

Row i's mask is that of the grammar behind what was emitted and the drafts before row i. Masked logits are all that the
rest of a step sees, so a draft outside the grammar is never the target's token and is cut there; rows behind it are not
used, and not masked. The host must know what was emitted and drafted: a step with such a request is read back at once,
and its masks are computed while the target's pass runs.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peagle.engine.device import to_device
from peagle.grammar import Grammar, GrammarCompiler, clean_error_text

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarState:
    """One request's. `over`: nothing can follow; `refused`: why the grammar did not take what was said."""

    def __init__(
        self, grammars: GrammarCompiler, grammar: Grammar, stops: Collection[int], min_tokens: int
    ) -> None:
        self.matcher: LLMatcher = grammars.matcher(grammar)
        self.executor = grammars.executor
        self.stops, self.min_tokens = sorted(stops), min_tokens
        self.said = 0
        self.over, self.refused = False, ""

    def consume(self, tokens: Sequence[int]) -> int:
        """How many of the tokens belong to the answer: up to the one behind which nothing can follow."""
        for count, token in enumerate(tokens, 1):
            if not self.matcher.consume_token(token):
                self.refused = clean_error_text(self.matcher.get_error())
            self.over = self.matcher.is_stopped()
            if self.over:
                return count
        self.said += len(tokens)
        return len(tokens)

    def postpone_stops(self, masks: Tensor) -> None:
        """Masks [R, words] without stop tokens before `min_tokens`, unless the grammar has nothing else to say."""
        for mask in masks[: max(0, self.min_tokens - self.said)].view(torch.uint8):
            others = mask.clone()
            for stop in (stop for stop in self.stops if stop // 8 < len(mask)):
                others[stop // 8] &= 255 ^ 1 << stop % 8
            if others.any():
                mask.copy_(others)


class GrammarMasks:
    """Of the requests in one pass that are bound: (row of the batch, binding) of each."""

    def __init__(self, members: list[tuple[int, GrammarState]]) -> None:
        self.rows = [row for row, _ in members]
        self.bindings = [binding for _, binding in members]

    def apply(self, logits: Tensor, drafts: list[list[int]]) -> None:
        """logits [B, R, V], in place; drafts of the whole batch, R - 1 each."""
        at = to_device(torch.tensor(self.rows), logits.device)
        masks = to_device(
            self._fill([drafts[row] for row in self.rows], logits.shape[-1]), logits.device
        )
        logits[at] = logits[at].masked_fill(~unpack_bitmask(masks, logits.shape[-1]), -torch.inf)

    def _fill(self, drafts: list[list[int]], vocab: int) -> Tensor:
        """[n, R, words] int32, one bit a token; rows that no accepted draft leads to allow everything."""
        from llguidance.numpy import (
            fill_next_token_bitmask_par as fill,  # its torch twin loads the compiler: seconds
        )
        from llguidance.numpy import fill_next_token_bitmask_par_with_draft_tokens as fill_drafted

        rows, executor = len(drafts[0]) + 1, self.bindings[0].executor
        masks = torch.full((len(drafts), rows, -(-vocab // 32)), -1, dtype=torch.int32)
        first = [(binding.matcher, rows * i) for i, binding in enumerate(self.bindings)]
        if rows == 1:
            fill(executor, first, masks[:, 0].numpy())
        else:
            drafted = [
                (matcher, at, more) for (matcher, at), more in zip(first, drafts, strict=True)
            ]
            fill_drafted(executor, drafted, masks.flatten(0, 1).numpy())
        for binding, mask in zip(self.bindings, masks, strict=True):
            binding.postpone_stops(mask)
        return masks


def unpack_bitmask(masks: Tensor, vocab: int) -> Tensor:
    """[..., words] int32 -> [..., vocab] bool. Words are little-endian, as on every machine that PyTorch runs on."""
    bits = torch.arange(8, dtype=torch.uint8, device=masks.device)
    return (masks.view(torch.uint8)[..., None] >> bits & 1).bool().flatten(-2)[..., :vocab]
