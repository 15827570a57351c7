"""The target's own token at every row of a batch, whatever each request asked for; the host never waits here.

    logits  [B, R, V]    row 0 follows what was emitted, row i the i drafts behind it
    drafts  [B, R - 1]   any ids of the vocabulary: a row is used only if all drafts before it were accepted
    emitted [B]          tokens emitted so far: row i decides position emitted + i of the answer
    masks   [B, R]       of trees (peagle/tree.py): row i follows the drafts it has bits for

The token of a row is the argmax of its processed logits, or the inverse of their CDF at the uniform number of its
position: what `peagle.sampling.choose` says for the same seed. Since each row is processed with its own history, the
acceptance rule stays lossless with respect to the processed distribution.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.engine.device import to_device
from peagle.engine.sampling.logits_processors import LOGITS_PROCESSORS, LogitsProcessor, Penalties
from peagle.engine.sampling.sampling_state import SamplingState
from peagle.kernels.triton.argmax import argmax

AT_ONCE = 2**25  # requests x rows x V: bounds the copies of logits that a group makes


class SamplingGroup:
    """Requests that need more than an argmax; all of them greedy, or none."""

    def __init__(self, members: list[tuple[int, SamplingState]]) -> None:
        histories = [h for _, h in members]
        self.device, self.greedy = histories[0].device, histories[0].sampling.greedy
        self.rows = self._index([row for row, _ in members])
        self.stages: list[
            tuple[Tensor | None, LogitsProcessor]
        ] = []  # the members it is for (None: all)
        for wanted, stage in LOGITS_PROCESSORS:
            at = [i for i, h in enumerate(histories) if wanted(h)]
            if at:
                index = None if len(at) == len(histories) else self._index(at)
                self.stages.append((index, stage([histories[i] for i in at])))
        if not self.greedy:  # tables of all lengths, one behind the other
            lengths = torch.tensor([len(h.uniforms) for h in histories])
            self.uniforms = torch.cat([h.uniforms for h in histories])
            self.last = to_device(lengths[:, None] - 1, self.device)
            self.first = to_device((lengths.cumsum(0) - lengths)[:, None], self.device)

    def _index(self, values: list[int]) -> Tensor:
        return to_device(torch.tensor(values), self.device)

    def choose(
        self, logits: Tensor, drafts: Tensor, emitted: Tensor, masks: Tensor | None = None
    ) -> Tensor:
        """[n, R]"""
        drafts = drafts[self.rows]
        before = followed(logits.shape[1], None if masks is None else masks[self.rows], self.device)
        position = emitted[self.rows, None].long() + before.sum(-1)
        x = logits[self.rows].float()
        for at, stage in self.stages:
            if at is None:
                x = stage(x, drafts, position, before)
            else:
                x[at] = stage(
                    x[at], drafts[at], position[at], before if masks is None else before[at]
                )
        return likeliest(x) if self.greedy else self._draw(x, position)

    def _draw(self, x: Tensor, position: Tensor) -> Tensor:
        """Rows behind max_tokens are never used: they take the last number."""
        uniform = self.uniforms[self.first + position.minimum(self.last)]
        cdf = x.softmax(-1).cumsum(-1, dtype=torch.float64)
        at = uniform[:, :, None] * cdf[..., -1:]
        return torch.searchsorted(cdf, at, right=True)[..., 0].clamp(max=x.shape[-1] - 1)

    def commit(self, tokens: Tensor, kept: Tensor) -> None:
        for at, stage in self.stages:
            if isinstance(stage, Penalties):
                rows = self.rows if at is None else self.rows[at]
                stage.commit(tokens[rows], kept[rows])


class Sampler:
    """One batch. Built anew when its requests change; what they said stays in their histories.

    A history belongs to the newest Processing that it was given to.
    """

    def __init__(self, histories: list[SamplingState], rows: int = 1) -> None:
        """`rows`: no pass has more of a request."""
        members = [(row, h) for row, h in enumerate(histories) if not h.plain]
        self.groups: list[SamplingGroup] = []
        for greedy in (True, False):
            alike = [(row, h) for row, h in members if h.sampling.greedy == greedy]
            at_once = max(1, AT_ONCE // (rows * alike[0][1].vocab)) if alike else 1
            self.groups += [
                SamplingGroup(alike[i : i + at_once]) for i in range(0, len(alike), at_once)
            ]

    def choose(
        self, logits: Tensor, drafts: Tensor, emitted: Tensor, masks: Tensor | None = None
    ) -> Tensor:
        """[B, R] int64: the target's token at each row."""
        tokens = likeliest(logits)
        for group in self.groups:
            tokens[group.rows] = group.choose(logits, drafts, emitted, masks)
        return tokens

    def commit(self, tokens: Tensor, kept: Tensor) -> None:
        """tokens[b, : kept[b] + 1] were emitted."""
        for group in self.groups:
            group.commit(tokens, kept)


def followed(rows: int, masks: Tensor | None, device: torch.device) -> Tensor:
    """[1 or n, R, R - 1] bool: the drafts that row i follows: the first i; of a tree, its ancestors and itself."""
    at = torch.arange(rows, device=device)
    if masks is None:
        return (at[1:] <= at[:, None])[None]
    return (masks[:, :, None] >> at[1:] & 1).bool()


class Logprobs(NamedTuple):
    chosen: Tensor  # [B, R]
    rank: Tensor  # [B, R]: 1 is the likeliest
    ids: Tensor  # [B, R, top], the likeliest first
    values: Tensor  # [B, R, top]


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    """Of the raw logits [B, R, V], before any processing, for the tokens [B, R]."""
    total = logits.float().logsumexp(-1, keepdim=True)
    own = logits.gather(-1, tokens[..., None])
    values, ids = logits.topk(top, sorted=True)
    return Logprobs((own - total)[..., 0], (logits > own).sum(-1) + 1, ids, values - total)


def likeliest(logits: Tensor) -> Tensor:
    """[..., V] -> [...]: the first of the largest."""
    return argmax(logits.flatten(0, -2))[0].view(logits.shape[:-1])
