"""Log-probabilities of a prompt's own tokens, from one teacher-forced pass of the target.

The pass is cut into parts, so that the engines can step between them. Its KV cache is not one of
the engines' pages: the driver limits how many tokens are scored at once.
"""

from collections.abc import Generator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peagle.engine.sampling.sampler import Logprobs, logprobs
from peagle.engine.stream import TokenLogprob
from peagle.server.http.errors import ApiError

if TYPE_CHECKING:
    from peagle.target import Target
    from peagle.target.cache import RollbackCache

ROWS_PER_PART = 256


def score_prompt(
    target: "Target", ids: list[int], top: int
) -> Generator[None, None, list[TokenLogprob]]:
    """Score ids[1:], each given all tokens before it, with the `top` likeliest tokens."""
    cache = target.new_cache()
    scores: list[TokenLogprob] = []
    for start in range(0, len(ids) - 1, ROWS_PER_PART):
        end = min(start + ROWS_PER_PART, len(ids) - 1)
        next_ids = ids[start + 1 : end + 1]
        try:
            part = score_part(target, cache, ids[start:end], next_ids, max(top, 1))
        except torch.OutOfMemoryError:
            part = None
        if part is None:
            del cache  # The traceback of the error must not keep it.
            raise ApiError(
                503,
                f"no memory is left to score a prompt of {len(ids)} tokens: shorten it, or lower"
                " the server's --kv-tokens",
                retry_after=2,
            )
        own = part.chosen[0].tolist()
        rank = part.rank[0].tolist()
        top_ids = part.ids[0, :, :top].tolist()
        top_values = part.values[0, :, :top].tolist()
        scores += [
            TokenLogprob(token, own[i], rank[i], dict(zip(top_ids[i], top_values[i], strict=True)))
            for i, token in enumerate(next_ids)
        ]
        yield
    return scores


@torch.inference_mode()
def score_part(
    target: "Target", cache: "RollbackCache", ids: list[int], next_ids: list[int], top: int
) -> Logprobs:
    """ids [R] continue the cache; next_ids [R] holds the token after each of them."""
    logits: Tensor = target.forward(torch.tensor(ids, device=target.device), cache).logits
    return logprobs(logits[None].float(), torch.tensor([next_ids], device=target.device), top)
