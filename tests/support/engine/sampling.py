"""A function as target, its logits after the processors of transformers, and sampling options."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from peagle.core import Sampling
from peagle.engine.sampling.sampler import Sampler
from peagle.engine.sampling.sampling_state import SamplingState
from peagle.reference.sampling_rule import probabilities

TABLE = torch.randn(997, 9, generator=torch.Generator().manual_seed(5)) * 2
STOPS = frozenset({1, 4})
PROMPT = [3, 1, 4, 1]


def target(ids: list[int], vocab: int = 9) -> torch.Tensor:
    """The logits [V] after any tokens: a target without weights."""
    return TABLE[hash(tuple(ids)) % len(TABLE), :vocab]


def processed(
    prompt: list[int], output: list[int], sampling: Sampling, min_tokens: int, vocab: int = 9
) -> torch.Tensor:
    """One row [1, V], processed by bias, min_tokens and penalties."""
    ids = torch.tensor([prompt + output])
    x = target(prompt + output, vocab)[None].clone()
    if sampling.logit_bias:
        # transformers declares a list of pairs, and also accepts a dictionary.
        biases: Any = {(i,): float(b) for i, b in sampling.logit_bias.items()}
        x = SequenceBiasLogitsProcessor(biases)(ids, x)
    x = MinNewTokensLengthLogitsProcessor(len(prompt), min_tokens, sorted(STOPS))(ids, x)
    x = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, x)
    for token, count in Counter(output).items():
        x[0, token] = x[0, token] - sampling.frequency_penalty * count - sampling.presence_penalty
    return x


OPTIONS = {
    "plain sampling": {},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.8},
    "all": {
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.02,
        "logit_bias": {2: 1.0},
        "presence_penalty": 0.7,
    },
}


def three_tokens(
    option: dict, runs: int, vocab: int
) -> tuple[dict[tuple[int, ...], float], Sampler]:
    """The probability of every answer of three tokens, and a sampler with `runs` seeds."""
    sampling = Sampling(temperature=1.2, **option)
    exact = {}
    for answer in itertools.product(range(vocab), repeat=3):
        each = [
            probabilities(processed(PROMPT, list(answer[:i]), sampling, 1, vocab), sampling)
            for i in range(3)
        ]
        exact[answer] = float(
            np.prod([float(p[0, token]) for p, token in zip(each, answer, strict=True)])
        )
    seeded = [Sampling(temperature=1.2, **option, seed=seed) for seed in range(runs)]
    sampler = Sampler(
        [SamplingState(s, PROMPT, 3, vocab=vocab, min_tokens=1, stop_ids=STOPS) for s in seeded]
    )
    return exact, sampler
