"""The token that the target chooses at each row, and the number of drafts that agree.

The acceptance rule is the same for greedy decoding and for sampling: choose the target's token at
every row, accept the drafts as long as they are equal to it, and emit the target's token at the
first row where they are not. With a temperature this *is* rejection sampling with a one-hot
proposal: draft x is accepted with probability p(x), and given its rejection the token is
distributed as p without x, renormalized. The output is therefore distributed exactly as the
target's processed distribution.

One uniform number belongs to each position of the answer, for every K and method: a seed gives the
same answer with and without speculation.
"""

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from peagle.core import Sampling


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits [R, V] -> processed distribution [R, V]; processors in the order of transformers."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        processors.append(MinPLogitsWarper(sampling.min_p))
    no_ids = torch.empty(0)  # these processors do not look at the tokens so far
    return processors(no_ids, logits.float()).softmax(-1)


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """The target's token at each row [R], from logits [R, V] and uniform [R] in [0, 1).

    A sampled token is the inverse of the cumulative distribution at the uniform number.
    """
    if sampling.greedy:
        return logits.argmax(-1)
    cdf = probabilities(logits, sampling).double().cumsum(-1)  # [R, V]
    threshold = uniform.to(cdf)[:, None] * cdf[:, -1:]  # [R, 1]
    return torch.searchsorted(cdf, threshold, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)


def accept(drafts: Tensor, tokens: Tensor) -> int:
    """The number of accepted drafts [K], given the target's tokens [K + 1]."""
    return int((drafts == tokens[: len(drafts)]).cumprod(0).sum())


def uniforms(seed: int | None, count: int) -> Tensor:
    """The first `count` uniform numbers of a seed; a longer call starts with the same ones."""
    return torch.from_numpy(np.random.default_rng(seed).random(count))
