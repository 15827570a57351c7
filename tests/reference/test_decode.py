"""Losslessness: every method gives the same tokens, for any drafter."""

import itertools

import pytest
import torch

from peagle.core import Sampling
from peagle.errors import UserError
from peagle.reference import reference
from peagle.reference.decode import decode
from peagle.reference.proposer import Verified, proposer_for
from peagle.target import Target
from tests.support.engine.decoding import (
    GREEDY,
    PATTERNS,
    Oracle,
    plain,
    tokens_of,
    transformers_generate,
)
from tests.support.models.target_cases import targets_and_methods
from tests.support.models.tiny_models import AUX, LEARNED_POSITIONS, make_drafter, make_target


@pytest.mark.parametrize(
    ("any_target", "method"),
    targets_and_methods(["p-eagle"], ["p-eagle", "eagle3"]),
    indirect=["any_target"],
)
def test_all_decoders_agree(any_target: Target, method, prompt) -> None:
    drafter = make_drafter(any_target, method, layers=3 if method == "p-eagle" else 1)
    any_target.tap(AUX)
    for k in (1, 4, 7):
        ids = prompt(5 + k)
        expected = transformers_generate(any_target, ids, 10)
        cached = list(decode(any_target, proposer_for(drafter), ids, k, 10, GREEDY))
        slow = reference.decode(any_target, drafter, ids, k, 10, GREEDY)
        assert plain(any_target, ids, 10) == expected
        assert tokens_of(cached) == expected
        assert tokens_of(slow)[:10] == expected
        assert [step.accepted for step in cached] == [step.accepted for step in slow]


SAMPLINGS = {"greedy": GREEDY, "sampled": Sampling(temperature=1.2, top_p=0.9, seed=5)}


@pytest.mark.parametrize("right", PATTERNS.values(), ids=PATTERNS.keys())
@pytest.mark.parametrize(
    ("any_target", "method"), targets_and_methods(["greedy"], [*SAMPLINGS]), indirect=["any_target"]
)
def test_adversarial_drafters(any_target: Target, right: list[bool], method: str, prompt) -> None:
    any_target.tap(())
    sampling = SAMPLINGS[method]
    ids, k, count = prompt(9), 7, 18
    answer = plain(any_target, ids, count, sampling)
    steps = list(decode(any_target, Oracle(ids, answer, right), ids, k, count, sampling))
    assert tokens_of(steps) == answer
    full = [step.accepted for step in steps[1:-1]]
    leading = next((i for i, ok in enumerate(right) if not ok), k)
    assert set(full) == {leading}
    assert len(steps) == 1 + -(-(count - 1) // (leading + 1))


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_proposals_equal_the_reference_for_any_acceptance(target: Target, method, prompt) -> None:
    """The cached drafter equals the cache-free one after accepted, rejected and mixed blocks."""
    drafter = make_drafter(target, method, layers=4 if method == "p-eagle" else 1, draft_vocab=40)
    target.tap(AUX)
    ids, k = prompt(6), 5
    answer = plain(target, ids, 60)
    sequence = ids + answer

    class Watcher:
        """Proposes partly correct drafts; compares the drafter with the reference at each step."""

        def __init__(self) -> None:
            self.mine = proposer_for(drafter)
            self.compared = 0
            self.turns = itertools.cycle(PATTERNS.values())

        def propose(self, verified: Verified, k: int) -> torch.Tensor:
            n = verified.first + len(verified.ids) - verified.rejected
            prefix = torch.tensor(sequence[: n + 1])
            hidden = target.forward(prefix[:-1]).hidden
            assert torch.equal(
                self.mine.propose(verified, k), reference.propose(drafter, hidden, prefix, k)
            )
            self.compared += 1
            return Oracle(ids, answer, next(self.turns)).propose(verified, k)

    watcher = Watcher()
    assert tokens_of(list(decode(target, watcher, ids, k, 60, GREEDY))) == answer
    assert watcher.compared >= 10


def test_correct_drafts_are_accepted(target: Target, prompt) -> None:
    """A drafter that always drafts the target's most frequent token has accepted drafts."""
    drafter = make_drafter(target, "p-eagle", 2)
    target.tap(AUX)
    ids = prompt(8)
    answer = plain(target, ids, 30)
    favorite = max(set(answer), key=answer.count)
    drafter.lm_head = torch.zeros_like(drafter.lm_head)
    drafter.lm_head[favorite] = 1
    drafter.norm.weight.data.fill_(1)
    drafter.norm.register_forward_hook(lambda _module, _args, out: torch.ones_like(out))
    steps = list(decode(target, proposer_for(drafter), ids, 3, 30, GREEDY))
    assert tokens_of(steps) == answer
    assert sum(step.accepted for step in steps) > 0


def test_stop_token_inside_an_accepted_block(target: Target, prompt) -> None:
    target.tap(())
    ids = prompt(4)
    answer = plain(target, ids, 30)
    stop = next(token for i, token in enumerate(answer) if i > 3 and token not in answer[:i])
    end = answer.index(stop) + 1
    steps = list(decode(target, Oracle(ids, answer, [True]), ids, 7, 30, GREEDY, frozenset({stop})))
    assert tokens_of(steps) == answer[:end]
    # The pass accepts all drafts; the request receives the tokens up to the stop token.
    assert steps[-1].accepted == 7


@pytest.mark.parametrize(
    ("method", "length"),
    [
        # One answer of more than 250 tokens runs by default; the others are slow.
        pytest.param(
            *(method, length),
            marks=pytest.mark.slow if length < 250 and (method, length) != ("p-eagle", 1) else [],
        )
        for method in ("p-eagle", "eagle3")
        for length in (1, 2, 250, 253, 254, 255)
    ],
)
def test_decoding_ends_at_the_end_of_the_context(
    target: Target, method, length: int, prompt
) -> None:
    drafter = make_drafter(target, method, 1)
    target.tap(AUX)
    ids = prompt(length)
    steps = list(decode(target, proposer_for(drafter), ids, 7, 300, GREEDY))
    assert len(tokens_of(steps)) == target.context - length
    assert tokens_of(steps) == plain(target, ids, 300)


@pytest.mark.parametrize("name", LEARNED_POSITIONS)
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_no_draft_needs_a_position_beyond_the_context(name: str, method, prompt) -> None:
    """Learned position embeddings have no entry beyond the context."""
    target = make_target(name)
    drafter = make_drafter(target, method, 1)
    target.tap(AUX)
    ids = prompt(target.context - 9)
    steps = list(decode(target, proposer_for(drafter), ids, 7, 300, GREEDY))
    slow = reference.decode(target, drafter, ids, 7, 300, GREEDY)
    assert len(tokens_of(steps)) == 9 and tokens_of(slow)[:9] == tokens_of(steps)
    assert [step.accepted for step in steps] == [step.accepted for step in slow]


@pytest.mark.parametrize(
    ("ids", "count", "words"),
    [
        ([3] * 256, 5, "context holds 256"),
        ([], 5, "empty"),
        ([3], 0, "at least one token"),
        ([96], 1, "vocabulary"),
    ],
)
def test_invalid_requests_are_refused(
    target: Target, ids: list[int], count: int, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        next(decode(target, None, ids, 0, count, GREEDY))


def test_decoding_in_bfloat16(prompt) -> None:
    target = make_target()
    target.model.to(torch.bfloat16)
    drafter = make_drafter(target, "p-eagle", 2)
    target.tap(AUX)
    assert (
        len(tokens_of(list(decode(target, proposer_for(drafter), prompt(8), 3, 12, GREEDY)))) == 12
    )
