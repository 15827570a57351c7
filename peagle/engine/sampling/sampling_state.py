"""SamplingState: what one request brings to the Sampler. It survives every change of the batch."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from peagle.core import Sampling
from peagle.engine.device import to_device
from peagle.errors import UserError
from peagle.reference.sampling_rule import uniforms


def check_logit_bias(sampling: Sampling, vocab: int) -> None:
    if bad := [token for token in sampling.logit_bias if token >= vocab]:
        raise UserError(
            f"logit_bias names token ids {bad[:5]}, but the target's vocabulary ends at {vocab - 1}"
        )


class SamplingState:
    """The sampling parameters of a request, and the device tensors that they need:

    logit_bias  [V] float32   with a logit bias
    in_prompt   [V] bool      with penalties: the tokens of the prompt
    counts      [V] int32     with penalties: how often the answer has each token;
                              `Sampler.commit` adds to it
    uniforms    [max_tokens]  unless greedy: the uniform number of each position of the answer
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
        output: Sequence[int] = (),
    ) -> None:
        """`output`: tokens emitted before the request was preempted."""
        check_logit_bias(sampling, vocab)
        self.sampling = sampling
        self.vocab = vocab
        self.device = torch.device(device)
        self.min_tokens = min_tokens
        self.stop_ids: list[int] = []  # forbidden before `min_tokens`
        if min_tokens > len(output):
            self.stop_ids = sorted(stop for stop in stop_ids if stop < vocab)
        # Plain requests take the argmax of the raw logits.
        self.plain = sampling.plain and not self.stop_ids
        if sampling.logit_bias:
            self.logit_bias = self._vector(sampling.logit_bias, torch.float32)
        if sampling.penalized:
            self.in_prompt = self._vector(dict.fromkeys(prompt, True), torch.bool)
            self.counts = self._vector(Counter(output), torch.int32)
        if not sampling.greedy:
            self.uniforms = to_device(uniforms(sampling.seed, max_tokens), self.device)

    def _vector(self, values: Mapping[int, float], dtype: torch.dtype) -> Tensor:
        """[V]: the given values at their token ids, zero elsewhere."""
        vector = torch.zeros(self.vocab, dtype=dtype)
        vector[list(values)] = torch.tensor(list(values.values()), dtype=dtype)
        return to_device(vector, self.device)
