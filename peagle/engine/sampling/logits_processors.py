"""The logits processors between the target's logits and its token, in the order they apply.

    1. logit_bias
    2. min_tokens                   no stop token before that
    3. penalties                    repetition as in transformers; frequency, presence as in OpenAI
    4. temperature                  from here on only for requests that sample
    5. top_k
    6. top_p
    7. min_p                        4-7: the order and arithmetic of
                                    peagle.reference.sampling_rule.probabilities

A processor is built for the n requests of a batch that need it, and maps logits [n, R, V] to
logits [n, R, V]. It also gets

    drafts    [n, R - 1]
    position  [n, R]             of each row in its answer
    follows   [1 or n, R, R - 1] whether row i follows draft j: its history is what was emitted,
                                 and these drafts

Parameters are columns on the device, so that one pass serves requests with different ones.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.core import Sampling
from peagle.engine.device import to_device
from peagle.engine.sampling.row_softmax import softmax
from peagle.engine.sampling.sampling_state import SamplingState
from peagle.kernels.triton.top_p import top_p as remove_tail

LogitsProcessor = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def column(
    states: list[SamplingState],
    value: Callable[[Sampling], float],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[n, 1, 1]: one parameter of each request."""
    values = torch.tensor([value(state.sampling) for state in states], dtype=dtype)
    return to_device(values[:, None, None], states[0].device)


def logit_bias(states: list[SamplingState]) -> LogitsProcessor:
    bias = torch.stack([state.logit_bias for state in states])[:, None]
    return lambda x, drafts, position, follows: x + bias


def min_tokens(states: list[SamplingState]) -> LogitsProcessor:
    """Forbid stop tokens before `min_tokens`. Short lists of stop ids repeat their first one."""
    device = states[0].device
    width = max(len(state.stop_ids) for state in states)
    padded = [s.stop_ids + s.stop_ids[:1] * (width - len(s.stop_ids)) for s in states]
    stop_ids = to_device(torch.tensor(padded)[:, None], device)  # [n, 1, S]
    minimum = to_device(torch.tensor([s.min_tokens for s in states])[:, None], device)  # [n, 1]

    def process(x: Tensor, drafts: Tensor, position: Tensor, follows: Tensor) -> Tensor:
        index = stop_ids.expand(-1, x.shape[1], -1)
        stop_logits = x.gather(2, index)
        too_early = (position < minimum)[:, :, None]
        return x.scatter(2, index, stop_logits.masked_fill(too_early, -torch.inf))

    return process


class Penalties:
    """Repetition, frequency and presence penalties.

    This is the only processor with state: it owns the token counts of its requests, and their
    SamplingStates keep views of them.
    """

    def __init__(self, states: list[SamplingState]) -> None:
        self.in_prompt = torch.stack([state.in_prompt for state in states])  # [n, V]
        self.counts = torch.stack([state.counts for state in states])  # [n, V]
        for i, state in enumerate(states):
            state.in_prompt = self.in_prompt[i]
            state.counts = self.counts[i]
        self.repetition = column(states, lambda s: s.repetition_penalty)
        self.presence = column(states, lambda s: s.presence_penalty)
        self.frequency = column(states, lambda s: s.frequency_penalty)

    def __call__(self, x: Tensor, drafts: Tensor, position: Tensor, follows: Tensor) -> Tensor:
        n, rows, _ = x.shape
        counts = self.counts[:, None].repeat(1, rows, 1)
        counts.scatter_add_(2, drafts[:, None].expand(n, rows, -1), follows.int().expand(n, -1, -1))
        in_answer = counts > 0
        x = torch.where(
            in_answer | self.in_prompt[:, None],
            torch.where(x < 0, x * self.repetition, x / self.repetition),
            x,
        )
        return x - self.frequency * counts - self.presence * in_answer

    def commit(self, tokens: Tensor, accepted: Tensor) -> None:
        """Count tokens[:, : accepted + 1]: the accepted drafts and the bonus token."""
        emitted = torch.arange(tokens.shape[1], device=tokens.device) <= accepted[:, None]
        self.counts.scatter_add_(1, tokens, emitted.int())


def temperature(states: list[SamplingState]) -> LogitsProcessor:
    divisor = column(states, lambda s: s.temperature)
    return lambda x, drafts, position, follows: x / divisor


def top_k(states: list[SamplingState]) -> LogitsProcessor:
    max_k = max(state.sampling.top_k for state in states)
    last = column(states, lambda s: s.top_k - 1, torch.int64)

    def process(x: Tensor, drafts: Tensor, position: Tensor, follows: Tensor) -> Tensor:
        threshold = x.topk(max_k).values.gather(2, last.expand(-1, x.shape[1], 1))
        return x.masked_fill(x < threshold, -torch.inf)

    return process


def top_p(states: list[SamplingState]) -> LogitsProcessor:
    tail = column(states, lambda s: 1 - s.top_p, torch.float64)[..., 0]

    def process(x: Tensor, drafts: Tensor, position: Tensor, follows: Tensor) -> Tensor:
        tails = tail.expand(x.shape[:2]).flatten()
        return remove_tail(x.flatten(0, 1), tails).view(x.shape)

    return process


def min_p(states: list[SamplingState]) -> LogitsProcessor:
    fraction = column(states, lambda s: s.min_p)

    def process(x: Tensor, drafts: Tensor, position: Tensor, follows: Tensor) -> Tensor:
        p = softmax(x)
        return x.masked_fill(p < fraction * p.amax(-1, keepdim=True), -torch.inf)

    return process


class ProcessorEntry(NamedTuple):
    applies: Callable[[SamplingState], bool]
    build: Callable[[list[SamplingState]], LogitsProcessor]


LOGITS_PROCESSORS = (
    ProcessorEntry(lambda s: bool(s.sampling.logit_bias), logit_bias),
    ProcessorEntry(lambda s: bool(s.stop_ids), min_tokens),
    ProcessorEntry(lambda s: s.sampling.penalized, Penalties),
    ProcessorEntry(lambda s: not s.sampling.greedy, temperature),
    ProcessorEntry(lambda s: not s.sampling.greedy and 0 < s.sampling.top_k < s.vocab, top_k),
    ProcessorEntry(lambda s: not s.sampling.greedy and s.sampling.top_p < 1, top_p),
    ProcessorEntry(lambda s: not s.sampling.greedy and s.sampling.min_p > 0, min_p),
)
