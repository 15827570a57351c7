"""Acceptance without decoding: the walk along the matches is the step loop, step by step."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from peagle.catalog.pair import Pair, TargetSource
from peagle.core import Method, Sampling, Step
from peagle.draft_shape import DraftShape
from peagle.loaded import LoadedPair
from peagle.reference.decode import decode
from peagle.reference.proposer import proposer_for
from peagle.train.data.documents import join
from peagle.train.data.pack import Pack, pack
from peagle.train.evaluation import acceptance as module
from peagle.train.evaluation.acceptance import (
    acceptance,
    answers,
    chain_matches,
    draft_everywhere,
    length_of,
    rows_everywhere,
    tree_acceptance,
    walk,
)
from peagle.train.features.features import Features
from peagle.train.objective.passes import Passes
from tests.support.tiny_models import AUX
from tests.support.training import RUNGS, Trained, prompts, trained

METHODS: list[Method] = ["p-eagle", "eagle3"]
GREEDY = Sampling()
TOKENS = 40
Turns = list[tuple[list[int], list[int]]]  # prompt and answer, alternating


def loop(
    one: Trained, prompt: list[int], k: int, sampling: Sampling = GREEDY, tokens: int = TOKENS
) -> list[Step]:
    one.target.tap(AUX)
    stop = one.target.stop_ids
    return list(decode(one.target, proposer_for(one.drafter), prompt, k, tokens, sampling, stop))


def tokens_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def packed_of(conversations: list[Turns]) -> Pack:
    parts = []
    for turns in conversations:
        ids = [token for prompt, answer in turns for token in prompt + answer]
        marks = [
            mark
            for prompt, answer in turns
            for mark in [False] * len(prompt) + [True] * len(answer)
        ]
        parts.append((np.array(ids), np.array(marks)))
    return pack(parts)


def walked(one: Trained, packed: Pack, k: int, most: int = 0) -> list[Step]:
    passes, features = Passes(one.drafter), Features(one.target, AUX)
    anchors, drafts = draft_everywhere(passes, features, packed, max(k, most))
    return walk(packed, anchors, chain_matches(packed, anchors, drafts, k), k)


def assert_equal_steps(mine: list[Step], loops: list[list[Step]]) -> None:
    """The loop's last step may count drafts behind the end of the answer: nobody knows the target's tokens there."""
    at = 0
    for steps in loops:
        steps = steps[1:]  # without the prefill's token
        own, at = mine[at : at + len(steps)], at + len(steps)
        assert own[:-1] == steps[:-1]
        assert [s.tokens for s in own] == [s.tokens for s in steps]
        assert not steps or (
            own[-1].accepted <= steps[-1].accepted and own[-1].drafted == steps[-1].drafted
        )
    assert at == len(mine)


KINDS = [("p-eagle", 0, ""), ("eagle3", 0, ""), *(("p-eagle", 48, rung) for rung in RUNGS)]


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize(("method", "draft_vocab", "rung"), KINDS)
def test_the_walk_is_the_greedy_loop(method: Method, draft_vocab: int, rung: str, k: int):
    one = trained(method, draft_vocab, rung)
    loops = [loop(one, prompt, k) for prompt in prompts(8)]
    packed = packed_of(
        [[(p, tokens_of(steps))] for p, steps in zip(prompts(8), loops, strict=True)]
    )
    most = 0 if one.drafter.config.bidirectional else 5  # K from one pass at the largest
    assert_equal_steps(walked(one, packed, k, most), loops)
    if k > 1:
        assert length_of(s for steps in loops for s in steps) > 1.5, (
            "too little is accepted for this to say much"
        )


@pytest.mark.parametrize("rung", ["", "dependency", "bidirectional"])
def test_the_walk_along_trees_is_what_the_engine_does(rung: str):
    one, tree = trained("p-eagle", 48, rung), DraftShape(4, 14)
    pair = LoadedPair(Pair("tiny", TargetSource(()), {}), one.target, {"p-eagle": one.drafter})
    loops = [pair.generate(p, 4, "p-eagle", TOKENS, tree=14).steps for p in prompts(8)]
    packed = packed_of(
        [[(p, tokens_of(steps))] for p, steps in zip(prompts(8), loops, strict=True)]
    )
    documents = join(
        [(packed.ids[packed.doc == i], packed.answer[packed.doc == i], str(i)) for i in range(8)]
    )
    steps = tree_acceptance(Passes(one.drafter), Features(one.target, AUX), documents, [tree], 512)[
        tree
    ]
    assert_equal_steps(steps, loops)
    assert length_of(steps) > 1.5


def test_a_dependency_changes_drafts():
    """Or the walks above would say nothing of it. The first draft of a block is never changed."""
    one = trained("p-eagle", 48, "dependency")
    packed = packed_of([[(p, tokens_of(loop(one, p, 5)))] for p in prompts(8)])
    parts = rows_everywhere(Passes(one.drafter), Features(one.target, AUX), packed, 5)
    _, normed, drafts = next(iter(parts))
    plain = one.drafter.greedy_token_ids(normed.flatten(0, 1)).view_as(drafts)
    assert (
        torch.equal(plain[:, 0], drafts[:, 0])
        and (plain[:, 1:] != drafts[:, 1:]).float().mean() > 0.02
    )


@pytest.mark.parametrize("method", METHODS)
def test_the_walk_along_a_sampled_answer(method: Method):
    one, loops = trained(method), []
    for seed, prompt in enumerate(prompts(8)):
        loops.append(loop(one, prompt, 4, Sampling(temperature=1.0, seed=seed)))
    packed = packed_of(
        [[(p, tokens_of(steps))] for p, steps in zip(prompts(8), loops, strict=True)]
    )
    assert_equal_steps(walked(one, packed, 4), loops)
    greedy = [tokens_of(loop(one, p, 4)) for p in prompts(8)]
    assert greedy != [tokens_of(steps) for steps in loops]
    assert any(step.accepted for steps in loops for step in steps[1:])


@pytest.mark.parametrize("method", METHODS)
def test_several_turns(method: Method):
    """Each answer is walked by itself; drafts never run into the next turn's prompt."""
    one, loops, conversations = trained(method), [], []
    for first, second in zip(prompts(4), prompts(8)[4:], strict=True):
        turns: Turns = []
        for prompt in (first, second):
            before = [token for turn in turns for part in turn for token in part]
            loops.append(loop(one, before + prompt, 4, tokens=20))
            turns.append((prompt, tokens_of(loops[-1])))
        conversations.append(turns)
    assert_equal_steps(walked(one, packed_of(conversations), 4), loops)


def test_one_token_answers_and_answers_without_a_prompt():
    """Nothing is drafted for either: the first token is the prefill's, and without a prompt there is none."""
    one = trained("p-eagle")
    steps = loop(one, prompts(1)[0], 4)
    whole = (prompts(1)[0], tokens_of(steps))
    packed = packed_of([[([7, 8], [9])], [([], [5, 6, 7, 8])], [whole], [([7], [8])], [([], [3])]])
    assert_equal_steps(walked(one, packed, 4), [steps])


def test_the_walk_by_hand():
    """Answer = tokens 2..7; the drafts of anchors 1 and 4 (newest token 2 and 5) are right twice and ever after."""
    packed = packed_of([[([20, 21], [22, 23, 24, 25, 26, 27])], [([50, 51], [52, 53])]])
    anchors = np.array([1, 2, 3, 4, 5, 6, 9, 10])
    drafts = np.zeros((8, 4), dtype=np.int64)
    drafts[0], drafts[3] = (
        [23, 24, 90, 26],
        [26, 27, 50, 51],
    )  # the right guess behind the wrong one does not count
    steps = walk(packed, anchors, chain_matches(packed, anchors, drafts, 4), 4)
    assert steps == [Step((23, 24, 25), 4, 2), Step((26, 27), 4, 2), Step((53,), 4, 0)]
    assert length_of(steps) == 1 + 4 / 3 and length_of([]) == 1.0
    assert walk(packed, anchors, chain_matches(packed, anchors, drafts, 1), 1)[0] == Step(
        (23, 24), 1, 1
    )


def test_answers_end_with_their_document():
    packed = packed_of([[([1], [2, 3])], [([4], [5, 6]), ([7], [8])]])
    assert answers(packed) == [(1, 3), (4, 6), (7, 8)]


@pytest.mark.parametrize(("method", "draft_vocab", "rung"), KINDS)
def test_groups_of_anchors_and_packs_do_not_matter(
    method: Method, draft_vocab: int, rung: str, monkeypatch
):
    """Nor does which K are asked for at once."""
    one = trained(method, draft_vocab, rung)
    parts = []
    for i, prompt in enumerate(prompts(6)):
        ids = np.array(prompt + tokens_of(loop(one, prompt, 4, tokens=20)))
        parts.append((ids, np.arange(len(ids)) >= 4, str(i)))
    documents, passes, features = join(parts), Passes(one.drafter), Features(one.target, AUX)
    whole = acceptance(passes, features, documents, [2, 4], 4096)
    monkeypatch.setattr(module, "GROUP", 13)
    assert acceptance(passes, features, documents, [2, 4], 128) == whole
    assert len(whole[2]) > len(whole[4]) > 0
    assert acceptance(passes, features, documents, [2], 4096)[2] == whole[2]
    monkeypatch.setattr(module, "PIECE", 7)
    assert acceptance(passes, features, documents, [4], 4096)[4] == whole[4]
    with torch.no_grad():
        assert acceptance(passes, features, documents.subset(np.arange(0)), [3], 128) == {3: []}
