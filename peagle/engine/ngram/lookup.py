"""Prompt lookup on the device: the most recent of the longest earlier occurrences.

The last n tokens of a request are looked for among its earlier tokens, for n from MAX_NGRAM down
to MIN_NGRAM, and what followed them there is the draft. A draft that reaches the newest token goes
on with its own beginning: a text with a period is continued with it.

    tokens 5 6 7 8 9 5 6 7, newest at position 7, K=4:

    position          0 1 2 3 4 5 6 7
    token             5 6 7 8 9 5 6 7
    match length      0 0 3 0 0 0 0       position 2 ends the longest match
    drafts            8 9 5 6

    tokens 5 6 5 6: position 1 ends a match of 2, drafts 5 6 5 6

Plain PyTorch operations of a fixed shape, which a CUDA graph can hold. The definition is
peagle/reference/ngram.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.draft_shape import MAX_NGRAM, MIN_NGRAM


class NgramMatches(NamedTuple):
    """The matches of B requests."""

    lengths: Tensor  # [B] int32: matched tokens, at most MAX_NGRAM; 0: no match
    drafts: Tensor  # [B, K] int64; without a match the newest token, repeated


def find_ngrams(tokens: Tensor, newest: Tensor, k: int) -> NgramMatches:
    """Match the last tokens of each request with its earlier ones.

    tokens [B, W]: the tokens of each request from position 0 on; newest [B]: the position of the
    last one. What lies behind it is not read.
    """
    newest = newest.long()[:, None]  # [B, 1]
    batch, width = tokens.shape
    columns = torch.arange(width, device=tokens.device)
    matching = columns < newest  # [B, W]
    lengths = torch.zeros(batch, width, dtype=torch.int8, device=tokens.device)
    for i in range(min(MAX_NGRAM, width)):
        suffix = tokens.gather(1, (newest - i).clamp(min=0))  # [B, 1]
        matching[:, :i] = False
        matching[:, i:] &= tokens[:, : width - i] == suffix
        lengths += matching
    # The longest match, and of these the last: lengths * width + columns.
    scores = lengths.long().mul_(width).add_(columns)
    best, end = scores.masked_fill_(lengths < MIN_NGRAM, -1).max(1, keepdim=True)
    matched = best >= 0
    end = torch.where(matched, end, newest - 1)
    offsets = torch.arange(k, device=tokens.device) % (newest - end)  # [B, K]
    drafts = tokens.gather(1, end + 1 + offsets).long()
    return NgramMatches(torch.where(matched, best // width, 0)[:, 0].int(), drafts)
