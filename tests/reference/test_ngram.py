"""Prompt lookup (n-gram drafting) follows its definition."""

import pytest

from peagle.core import Sampling
from peagle.draft_shape import MAX_NGRAM
from peagle.reference.decode import decode
from peagle.reference.ngram import NgramProposer, match_length, propose_ngram
from tests.support.engine.decoding import tokens_of
from tests.support.models.tiny_models import make_target


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([5, 6, 7, 8, 9, 5, 6, 7], [8, 9, 5, 6]),
        ([5, 6, 1, 5, 6, 2, 5, 6], [2, 5, 6, 2]),  # the most recent of two matches
        ([4, 5, 6, 1, 5, 6, 2, 4, 5, 6], [1, 5, 6, 2]),  # the longest match has priority
        ([3, 3, 3], [3, 3, 3, 3]),
        ([5, 6, 5, 6], [5, 6, 5, 6]),  # the period is continued
        ([1, 2, 3, 4, 3], []),  # a match of one token is too short
        ([1], []),
    ],
)
def test_drafts_continue_the_matching_tokens(tokens: list[int], drafts: list[int]) -> None:
    assert propose_ngram(tokens, 4) == drafts


def test_the_length_of_a_match_is_limited() -> None:
    tokens = list(range(20)) * 2
    assert match_length(tokens) == (MAX_NGRAM, 19)


def test_decoding_with_ngrams_equals_plain_decoding() -> None:
    target = make_target(seed=7, num_hidden_layers=3)
    prompt = [7, 8, 9, 10, 11, 12] * 3
    for sampling in (Sampling(), Sampling(temperature=0.7, seed=4)):
        plain = list(decode(target, None, prompt, 0, 40, sampling))
        steps = list(decode(target, NgramProposer(), prompt, 5, 40, sampling))
        assert tokens_of(steps) == tokens_of(plain)
        assert any(step.accepted for step in steps) or not sampling.greedy
