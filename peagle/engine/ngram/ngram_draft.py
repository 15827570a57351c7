"""NgramDraft: what prompt lookup proposes to a request, on the host."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NgramDraft:
    match_length: int  # 0: nothing is proposed.
    drafts: list[int]
    used: bool  # Whether the request's chain is this draft.
