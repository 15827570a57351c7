"""A prompt's own log-probabilities: one teacher-forced pass of the target, in parts, so that others get on."""

from collections.abc import Generator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peagle.engine.sampling.sampler import Logprobs, logprobs
from peagle.engine.stream import TokenLogprob

if TYPE_CHECKING:
    from peagle.target import Target
    from peagle.target.cache import RollbackCache

ROWS = 256  # of one part


def score(target: "Target", ids: list[int], top: int) -> Generator[None, None, list[TokenLogprob]]:
    """Of ids[1:], each given all before it. `top`: of so many of the likeliest, too."""
    cache, told = target.new_cache(), list[TokenLogprob]()
    for start in range(0, len(ids) - 1, ROWS):
        end = min(start + ROWS, len(ids) - 1)
        found = part(target, cache, ids[start:end], ids[start + 1 : end + 1], max(top, 1))
        own, rank = found.chosen[0].tolist(), found.rank[0].tolist()
        likeliest, values = found.ids[0, :, :top].tolist(), found.values[0, :, :top].tolist()
        told += [
            TokenLogprob(token, own[i], rank[i], dict(zip(likeliest[i], values[i], strict=True)))
            for i, token in enumerate(ids[start + 1 : end + 1])
        ]
        yield
    return told


@torch.inference_mode()
def part(
    target: "Target", cache: "RollbackCache", ids: list[int], after: list[int], top: int
) -> Logprobs:
    """ids [R] continue the cache; `after` [R]: the token behind each of them."""
    logits: Tensor = target.forward(torch.tensor(ids, device=target.device), cache).logits
    return logprobs(logits[None].float(), torch.tensor([after], device=target.device), top)
