"""Plain decoding with transformers, and a proposer that knows the answer."""

import itertools

import torch

from peagle.core import Sampling, Step
from peagle.reference.decode import decode
from peagle.reference.proposer import Verified
from peagle.target import Target

GREEDY = Sampling()


def tokens_of(steps: list[Step]) -> list[int]:
    return list(itertools.chain.from_iterable(step.tokens for step in steps))


def plain(target: Target, prompt: list[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    return tokens_of(list(decode(target, None, prompt, 0, count, sampling)))


def transformers_generate(target: Target, prompt: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        out = target.model.generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
    return out[0, len(prompt) :].tolist()


class Oracle:
    """A proposer that knows the answer; the pattern `right` says which of K drafts are right."""

    def __init__(self, prompt: list[int], answer: list[int], right: list[bool]) -> None:
        self.sequence = prompt + answer
        self.right = right

    def propose(self, verified: Verified, k: int) -> torch.Tensor:
        # The position of the newest token.
        n = verified.first + len(verified.ids) - verified.rejected
        truth = (self.sequence[n + 1 :] + [3] * k)[:k]
        flags = itertools.islice(itertools.cycle(self.right), k)
        return torch.tensor(
            [token if ok else (token + 1) % 96 for token, ok in zip(truth, flags, strict=True)]
        )


PATTERNS = {
    "always right": [True],
    "always wrong": [False],
    "right then wrong": [True, True, False, True, True, True, True],
    "wrong then right": [False, True, True, True, True, True, True],
}
