"""Sampler: the target's own token at every row of a batch. The host never waits here.

    logits  [B, R, V]    row 0 follows what was emitted, row i the first i drafts
    drafts  [B, R - 1]   any token ids: a row is used only if all drafts before it are accepted
    emitted [B]          tokens emitted so far: row i decides position emitted + i of the answer
    masks   [B, R]       of trees (peagle/draft_shape.py): row i follows the drafts of its bits

The token of a row is the argmax of its processed logits, or the inverse of their CDF at the uniform
number of its position: what `peagle.reference.sampling_rule.choose` gives for the same seed.

The acceptance rule: drafts are accepted as long as they equal the target's token at their row, and
the target's token at the first other row is emitted too. Each row is processed with its own
history, so the rule is lossless with respect to the processed distribution.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.engine.device import to_device
from peagle.engine.sampling.logits_processors import (
    LOGITS_PROCESSORS,
    LogitsProcessor,
    Penalties,
)
from peagle.engine.sampling.row_softmax import log_softmax, softmax
from peagle.engine.sampling.sampling_state import SamplingState
from peagle.kernels.triton.argmax import argmax
from peagle.kernels.triton.draw_tokens import draw_tokens

# Limit of requests x rows x V in a group: bounds the copies of logits that its processors make.
MAX_GROUP_LOGITS = 2**25


class SamplingGroup:
    """Requests that need more than an argmax; either all of them are greedy, or none."""

    def __init__(self, members: list[tuple[int, SamplingState]]) -> None:
        """`members`: (row of the batch, state) of each request."""
        states = [state for _, state in members]
        self.device = states[0].device
        self.greedy = states[0].sampling.greedy
        self.rows = self._index([row for row, _ in members])
        # (members that the processor is for, or None for all; processor)
        self.processors: list[tuple[Tensor | None, LogitsProcessor]] = []
        for entry in LOGITS_PROCESSORS:
            users = [i for i, state in enumerate(states) if entry.applies(state)]
            if users:
                index = None if len(users) == len(states) else self._index(users)
                self.processors.append((index, entry.build([states[i] for i in users])))
        if not self.greedy:  # one table of uniform numbers, request after request
            lengths = torch.tensor([len(state.uniforms) for state in states])
            self.uniforms = torch.cat([state.uniforms for state in states])
            self.last = to_device(lengths[:, None] - 1, self.device)
            self.first = to_device((lengths.cumsum(0) - lengths)[:, None], self.device)

    def _index(self, values: list[int]) -> Tensor:
        return to_device(torch.tensor(values), self.device)

    def choose(
        self, logits: Tensor, drafts: Tensor, emitted: Tensor, masks: Tensor | None = None
    ) -> Tensor:
        """The target's token at each row of the members, [n, R]; arguments of the whole batch."""
        drafts = drafts[self.rows]
        own_masks = None if masks is None else masks[self.rows]
        follows = followed_drafts(logits.shape[1], own_masks, self.device)
        position = emitted[self.rows, None].long() + follows.sum(-1)
        x = logits[self.rows].float()
        for users, process in self.processors:
            if users is None:
                x = process(x, drafts, position, follows)
            else:
                x[users] = process(
                    x[users],
                    drafts[users],
                    position[users],
                    follows if masks is None else follows[users],
                )
        return greedy_tokens(x) if self.greedy else self._draw(x, position)

    def _draw(self, x: Tensor, position: Tensor) -> Tensor:
        """Sample each row [n, R, V] by the uniform number of its position.

        Rows beyond max_tokens are never used: they take the last number.
        """
        uniform = self.uniforms[self.first + position.minimum(self.last)]
        return draw_tokens(softmax(x).flatten(0, 1), uniform.flatten()).view(uniform.shape)

    def commit(self, tokens: Tensor, accepted: Tensor) -> None:
        for users, process in self.processors:
            if isinstance(process, Penalties):
                rows = self.rows if users is None else self.rows[users]
                process.commit(tokens[rows], accepted[rows])


class Sampler:
    """Samples for one batch. It is built anew when the requests of the batch change.

    The SamplingStates keep what requests have emitted; each belongs to the newest Sampler that it
    was passed to.
    """

    def __init__(
        self,
        states: list[SamplingState],
        max_rows: int = 1,
        max_group_logits: int = MAX_GROUP_LOGITS,
    ) -> None:
        """`max_rows`: no pass has more rows of a request."""
        members = [(row, state) for row, state in enumerate(states) if not state.plain]
        self.groups: list[SamplingGroup] = []
        for greedy in (True, False):
            part = [(row, state) for row, state in members if state.sampling.greedy == greedy]
            size = max(1, max_group_logits // (max_rows * part[0][1].vocab)) if part else 1
            self.groups += [SamplingGroup(part[i : i + size]) for i in range(0, len(part), size)]

    def choose(
        self, logits: Tensor, drafts: Tensor, emitted: Tensor, masks: Tensor | None = None
    ) -> Tensor:
        """The target's token at each row, [B, R] int64."""
        tokens = greedy_tokens(logits)
        for group in self.groups:
            tokens[group.rows] = group.choose(logits, drafts, emitted, masks)
        return tokens

    def commit(self, tokens: Tensor, accepted: Tensor) -> None:
        """Record that tokens[b, : accepted[b] + 1] were emitted."""
        for group in self.groups:
            group.commit(tokens, accepted)


def followed_drafts(rows: int, masks: Tensor | None, device: torch.device) -> Tensor:
    """[1 or n, R, R - 1] bool: whether row i follows draft j.

    In a chain these are the first i drafts, in a tree the row itself and its ancestors.
    """
    index = torch.arange(rows, device=device)
    if masks is None:
        return (index[1:] <= index[:, None])[None]
    return (masks[:, :, None] >> index[1:] & 1).bool()


class Logprobs(NamedTuple):
    chosen: Tensor  # [B, R]
    rank: Tensor  # [B, R] of the chosen token: 1 is the most likely
    ids: Tensor  # [B, R, top], the most likely first
    values: Tensor  # [B, R, top]


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    """Log-probabilities of the raw logits [B, R, V], before any processing, for tokens [B, R]."""
    values = log_softmax(logits.float())
    chosen = tokens[..., None]
    rank = (logits > logits.gather(-1, chosen)).sum(-1) + 1
    ids = logits.topk(top, sorted=True).indices
    return Logprobs(values.gather(-1, chosen)[..., 0], rank, ids, values.gather(-1, ids))


def greedy_tokens(logits: Tensor) -> Tensor:
    """[..., V] -> [...]: the argmax, the first of equals."""
    return argmax(logits.flatten(0, -2))[0].view(logits.shape[:-1])
