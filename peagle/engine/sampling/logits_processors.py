"""The stages between the target's logits and its token, each for the requests of a batch that want it.

A stage maps logits [n, R, V], drafts [n, R - 1], position [n, R] (of each row, in its answer) and before [1 or n, R,
R - 1] to logits [n, R, V]. Row i's history is what was emitted and the drafts that before[:, i] marks. `STAGES` is the
order: what is added and forbidden, penalties (repetition as transformers has it, frequency and presence as OpenAI
has them), then the order and the arithmetic of `peagle.sampling.probabilities`.
Parameters are columns on the device, so that one pass serves requests that differ.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from peagle.core import Sampling
from peagle.engine.device import to_device
from peagle.engine.sampling.sampling_state import SamplingState

LogitsProcessor = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def column(
    those: list[SamplingState],
    value: Callable[[Sampling], float],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[n, 1, 1]"""
    return to_device(
        torch.tensor([value(h.sampling) for h in those], dtype=dtype)[:, None, None],
        those[0].device,
    )


def bias(those: list[SamplingState]) -> LogitsProcessor:
    added = torch.stack([h.bias for h in those])[:, None]
    return lambda x, drafts, position, before: x + added


def forbid(those: list[SamplingState]) -> LogitsProcessor:
    """No stop token before `min_tokens`. A short list of stop ids is filled up with its first one."""
    device, most = those[0].device, max(len(h.stops) for h in those)
    filled = [h.stops + h.stops[:1] * (most - len(h.stops)) for h in those]
    stops = to_device(torch.tensor(filled)[:, None], device)  # [n, 1, S]
    least = to_device(torch.tensor([h.min_tokens for h in those])[:, None], device)  # [n, 1]

    def stage(x: Tensor, drafts: Tensor, position: Tensor, before: Tensor) -> Tensor:
        at = stops.expand(-1, x.shape[1], -1)
        return x.scatter(
            2, at, x.gather(2, at).masked_fill((position < least)[:, :, None], -torch.inf)
        )

    return stage


class Penalties:
    """The only stage that remembers: it owns the counts of its requests, their histories keep views of them."""

    def __init__(self, those: list[SamplingState]) -> None:
        self.prompted = torch.stack([h.prompted for h in those])  # [n, V]
        self.counts = torch.stack([h.counts for h in those])
        for i, h in enumerate(those):
            h.prompted, h.counts = self.prompted[i], self.counts[i]
        self.repetition = column(those, lambda s: s.repetition_penalty)
        self.presence = column(those, lambda s: s.presence_penalty)
        self.frequency = column(those, lambda s: s.frequency_penalty)

    def __call__(self, x: Tensor, drafts: Tensor, position: Tensor, before: Tensor) -> Tensor:
        n, rows, _ = x.shape
        counts = self.counts[:, None].repeat(1, rows, 1)
        counts.scatter_add_(2, drafts[:, None].expand(n, rows, -1), before.int().expand(n, -1, -1))
        said = counts > 0
        x = torch.where(
            said | self.prompted[:, None],
            torch.where(x < 0, x * self.repetition, x / self.repetition),
            x,
        )
        return x - self.frequency * counts - self.presence * said

    def commit(self, tokens: Tensor, kept: Tensor) -> None:
        """Adds tokens[:, : kept + 1]: the accepted drafts and the bonus."""
        emitted = torch.arange(tokens.shape[1], device=tokens.device) <= kept[:, None]
        self.counts.scatter_add_(1, tokens, emitted.int())


def temperature(those: list[SamplingState]) -> LogitsProcessor:
    by = column(those, lambda s: s.temperature)
    return lambda x, drafts, position, before: x / by


def top_k(those: list[SamplingState]) -> LogitsProcessor:
    most = max(h.sampling.top_k for h in those)
    last = column(those, lambda s: s.top_k - 1, torch.int64)

    def stage(x: Tensor, drafts: Tensor, position: Tensor, before: Tensor) -> Tensor:
        least = x.topk(most).values.gather(2, last.expand(-1, x.shape[1], 1))
        return x.masked_fill(x < least, -torch.inf)

    return stage


def top_p(those: list[SamplingState]) -> LogitsProcessor:
    tail = column(those, lambda s: 1 - s.top_p)

    def stage(x: Tensor, drafts: Tensor, position: Tensor, before: Tensor) -> Tensor:
        ranked, at = x.sort(stable=True)  # the least likely first
        gone = ranked.softmax(-1).cumsum(-1) <= tail
        gone[..., -1] = False
        return x.masked_fill(gone.scatter(2, at, gone), -torch.inf)

    return stage


def min_p(those: list[SamplingState]) -> LogitsProcessor:
    share = column(those, lambda s: s.min_p)

    def stage(x: Tensor, drafts: Tensor, position: Tensor, before: Tensor) -> Tensor:
        p = x.softmax(-1)
        return x.masked_fill(p < share * p.amax(-1, keepdim=True), -torch.inf)

    return stage


LOGITS_PROCESSORS: tuple[
    tuple[Callable[[SamplingState], bool], Callable[[list[SamplingState]], LogitsProcessor]], ...
] = (
    (lambda h: bool(h.sampling.logit_bias), bias),
    (lambda h: bool(h.stops), forbid),
    (lambda h: h.sampling.penalized, Penalties),
    (lambda h: not h.sampling.greedy, temperature),
    (lambda h: not h.sampling.greedy and 0 < h.sampling.top_k < h.vocab, top_k),
    (lambda h: not h.sampling.greedy and h.sampling.top_p < 1, top_p),
    (lambda h: not h.sampling.greedy and h.sampling.min_p > 0, min_p),
)
