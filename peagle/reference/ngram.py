"""Prompt lookup, as a definition: the continuation of an earlier occurrence of the last tokens."""

import torch
from torch import Tensor

from peagle.draft_shape import MAX_NGRAM, MIN_NGRAM
from peagle.reference.proposer import Verified


def match_length(tokens: list[int]) -> tuple[int, int]:
    """(n, end): the last n tokens also end at position `end`, before the newest one.

    The longest match counts, from MAX_NGRAM down to MIN_NGRAM tokens, and of these the last one.
    (0, -1): there is none.
    """
    for n in range(min(MAX_NGRAM, len(tokens) - 1), MIN_NGRAM - 1, -1):
        for end in range(len(tokens) - 2, n - 2, -1):
            if tokens[end - n + 1 : end + 1] == tokens[-n:]:
                return n, end
    return 0, -1


def propose_ngram(tokens: list[int], k: int) -> list[int]:
    """The k tokens behind the match; empty without one.

    Where the newest token is reached, the continuation starts again.
    """
    n, end = match_length(tokens)
    following = tokens[end + 1 :]
    return [following[i % len(following)] for i in range(k)] if n else []


class NgramProposer:
    """Drafts for the step loop (peagle/reference/decode.py); there may be none in a step."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def propose(self, verified: Verified, k: int) -> Tensor:
        self.tokens += verified.ids[: len(verified.ids) - verified.rejected].tolist()
        drafts = propose_ngram(self.tokens + verified.newest.tolist(), k)
        return torch.tensor(drafts, dtype=torch.long, device=verified.ids.device)
