"""What one request brings to `Processing`: made once, it survives every change of the batch."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from peagle.core import Sampling
from peagle.engine.device import to_device
from peagle.errors import UserError
from peagle.reference.sampling_rule import uniforms


def check_bias(sampling: Sampling, vocab: int) -> None:
    if bad := [token for token in sampling.logit_bias if token >= vocab]:
        raise UserError(
            f"logit_bias names token ids {bad[:5]}, but the target's vocabulary ends at {vocab - 1}"
        )


class SamplingState:
    """Tensors only where the settings need them, all on the device:

    bias      [V] float32   where there is a logit_bias
    prompted  [V] bool      where there are penalties: the prompt's tokens
    counts    [V] int32     where there are penalties: how often the answer said a token; `Processing.commit` adds to it
    uniforms  [max_tokens]  where the answer is sampled: the uniform number of each of its positions
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        vocab: int,
        device: torch.device | str = "cpu",
        min_tokens: int = 0,
        stop_ids: Collection[int] = (),
        output: Sequence[int] = (),  # tokens emitted before: a request that was interrupted
    ) -> None:
        check_bias(sampling, vocab)
        self.sampling, self.vocab, self.device = sampling, vocab, torch.device(device)
        self.min_tokens = min_tokens
        self.stops = (
            sorted(stop for stop in stop_ids if stop < vocab) if min_tokens > len(output) else []
        )
        self.plain = sampling.plain and not self.stops  # the argmax of the raw logits is its token
        if sampling.logit_bias:
            self.bias = self._vector(sampling.logit_bias, torch.float32)
        if sampling.penalized:
            self.prompted = self._vector(dict.fromkeys(prompt, True), torch.bool)
            self.counts = self._vector(Counter(output), torch.int32)
        if not sampling.greedy:
            self.uniforms = to_device(uniforms(sampling.seed, max_tokens), self.device)

    def _vector(self, values: Mapping[int, float], dtype: torch.dtype) -> Tensor:
        """[V]: the values at their tokens, zero elsewhere."""
        here = torch.zeros(self.vocab, dtype=dtype)
        here[list(values)] = torch.tensor(list(values.values()), dtype=dtype)
        return to_device(here, self.device)
