"""Which token the target says at each row, and how many drafts agree with it.

The acceptance rule, for greedy and for sampling alike: take the target's own token at every row, keep the drafts as
long as they equal it, and emit the target's token at the first row where they do not. With temperature this *is*
rejection sampling with a one-hot proposal: draft x is kept with probability p(x), and given that it is not, the token
is distributed as p without x, renormalized.

One uniform number belongs to each position of the answer, whatever K or method: a seed gives the same answer with and
without speculation.
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
    """[R, V] -> [R, V]: the target's processed distribution, in transformers' order of processors."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        chain.append(MinPLogitsWarper(sampling.min_p))
    return chain(torch.empty(0), logits.float()).softmax(-1)  # type: ignore[arg-type]  # Tensors are fine


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """The target's token at each row, [R]: logits [R, V], uniform [R] in [0, 1)."""
    if sampling.greedy:
        return logits.argmax(-1)
    cdf = probabilities(logits, sampling).double().cumsum(-1)
    at = uniform.to(cdf)[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, at, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)


def accept(drafts: Tensor, tokens: Tensor) -> int:
    """How many of the drafts [K] are kept, given the target's tokens [K + 1]."""
    return int((drafts == tokens[: len(drafts)]).cumprod(0).sum())


def uniforms(seed: int | None, count: int) -> Tensor:
    """The first `count` uniform numbers of a seed: a longer call starts with the same ones."""
    return torch.from_numpy(np.random.default_rng(seed).random(count))
