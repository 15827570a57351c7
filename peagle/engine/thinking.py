"""Thinking: the part of an answer before the answer itself, and how many tokens it may have."""

from collections.abc import Set
from dataclasses import dataclass

from peagle.errors import UserError


@dataclass(frozen=True, slots=True)
class Thinking:
    """Where the thinking part begins and ends. A grammar binds only what follows it.

    An answer that neither `starts_inside` nor begins with `start` does not think. Markers are
    found in the text of the tokens, so that it does not matter which tokens spell them.
    """

    ends: tuple[str, ...]  # The first of them ends the part.
    forced_end: tuple[int, ...]  # Tokens that close the part once the budget is used up.
    start: str = ""
    start_ids: tuple[int, ...] = ()  # Tokens that a grammar allows instead of its own first ones.
    starts_inside: bool = False  # The prompt has opened the part.
    budget: int | None = None  # Tokens of the part before it is closed by force; None: any number.

    def __post_init__(self) -> None:
        if not all(self.ends) or not self.ends or not self.forced_end:
            raise UserError("`thinking` needs `ends` and the tokens of a `forced_end`")
        if not self.starts_inside and not (self.start and self.start_ids):
            raise UserError("`thinking` needs a `start` with its tokens, or `starts_inside`")
        if self.budget is not None and self.budget < 0:
            raise UserError(f"the `budget` of `thinking` must be 0 or more; got {self.budget}")

    def check_tokens(self, vocab_size: int, forbidden: Set[int]) -> None:
        """Refuse forced tokens that the target cannot write; `forbidden`: by `min_tokens`."""
        if bad := [id for id in (*self.start_ids, *self.forced_end) if id >= vocab_size]:
            raise UserError(
                f"`thinking` names token ids {bad[:5]}, but the target's vocabulary ends at"
                f" {vocab_size - 1}: leave out its budget and the grammar"
            )
        if self.budget is not None and not forbidden.isdisjoint(self.forced_end):
            raise UserError(
                "the thinking part cannot be closed: its end is a stop token, which `min_tokens`"
                " forbids. Leave out one of the budget, `min_tokens` and the stop token"
            )
