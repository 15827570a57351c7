"""Acceptance without decoding: replayed steps equal those of the decoding loop."""

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
from peagle.train.data.documents import Document, join_documents
from peagle.train.data.pack import PackedDocuments, pack_sequences
from peagle.train.evaluation.acceptance import DraftReplay
from peagle.train.evaluation.replay import (
    acceptance_length,
    answer_spans,
    chain_matches,
    replay_steps,
)
from peagle.train.features.features import FeatureExtractor
from peagle.train.objective.passes import DrafterPasses
from tests.support.models.tiny_models import AUX
from tests.support.train.training import EXTENSIONS, Trained, prompts, trained

METHODS: list[Method] = ["p-eagle", "eagle3"]
GREEDY = Sampling()
TOKENS = 24
Turns = list[tuple[list[int], list[int]]]  # prompt and answer, alternating


def loop(
    pair: Trained, prompt: list[int], k: int, sampling: Sampling = GREEDY, tokens: int = TOKENS
) -> list[Step]:
    pair.target.tap(AUX)
    stop = pair.target.stop_ids
    return list(decode(pair.target, proposer_for(pair.drafter), prompt, k, tokens, sampling, stop))


def tokens_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


def packed_of(conversations: list[Turns]) -> PackedDocuments:
    parts = []
    for turns in conversations:
        ids = [token for prompt, answer in turns for token in prompt + answer]
        marks = [
            mark
            for prompt, answer in turns
            for mark in [False] * len(prompt) + [True] * len(answer)
        ]
        parts.append((np.array(ids), np.array(marks)))
    return pack_sequences(parts)


def replay_of(pair: Trained, pack_tokens: int = 4096, **sizes: int) -> DraftReplay:
    passes, features = DrafterPasses(pair.drafter), FeatureExtractor(pair.target, AUX)
    return DraftReplay(passes, features, pack_tokens, **sizes)


def replayed(pair: Trained, packed: PackedDocuments, k: int, max_k: int = 0) -> list[Step]:
    anchors, drafts = replay_of(pair).draft(packed, max(k, max_k))
    return replay_steps(packed, anchors, chain_matches(packed, anchors, drafts, k), k)


def assert_equal_steps(mine: list[Step], loops: list[list[Step]]) -> None:
    """The last step of the loop may accept drafts past the end of the answer; a replay cannot."""
    first = 0
    for steps in loops:
        steps = steps[1:]  # The first step is the prefill.
        own = mine[first : first + len(steps)]
        first += len(steps)
        assert own[:-1] == steps[:-1]
        assert [s.tokens for s in own] == [s.tokens for s in steps]
        assert not steps or (
            own[-1].accepted <= steps[-1].accepted and own[-1].drafted == steps[-1].drafted
        )
    assert first == len(mine)


PLAIN: list[tuple[Method, int, str]] = [("p-eagle", 0, ""), ("eagle3", 0, "")]
EXTENDED: list[tuple[Method, int, str]] = [("p-eagle", 48, extension) for extension in EXTENSIONS]
KINDS = PLAIN + EXTENDED


@pytest.mark.parametrize(
    ("method", "draft_vocab", "extension", "k"),
    [
        *((*kind, k) for kind in PLAIN for k in (1, 5)),
        *(pytest.param(*kind, 3, marks=pytest.mark.slow) for kind in PLAIN),
        # `all` includes these two, and they do not change the order of a replay.
        *(
            pytest.param(
                *(*kind, 3),
                marks=pytest.mark.slow if kind[2] in ("inject", "convolution") else [],
            )
            for kind in EXTENDED
        ),
    ],
)
def test_replay_equals_the_greedy_loop(method: Method, draft_vocab: int, extension: str, k: int):
    pair = trained(method, draft_vocab, extension)
    loops = [loop(pair, prompt, k) for prompt in prompts(5)]
    packed = packed_of(
        [[(p, tokens_of(steps))] for p, steps in zip(prompts(5), loops, strict=True)]
    )
    max_k = 0 if pair.drafter.config.bidirectional else 5  # One pass at the largest K serves all.
    assert_equal_steps(replayed(pair, packed, k, max_k), loops)
    if k > 1:
        assert acceptance_length(s for steps in loops for s in steps) > 1.5, (
            "too few drafts are accepted for a useful comparison"
        )


@pytest.mark.parametrize("extension", ["", "dependency", "bidirectional", "refinement"])
def test_replay_of_trees_equals_the_engine(extension: str):
    pair, shape = trained("p-eagle", 48, extension), DraftShape(4, 14)
    loaded = LoadedPair(Pair("tiny", TargetSource(()), {}), pair.target, {"p-eagle": pair.drafter})
    loops = [loaded.generate(p, 4, "p-eagle", TOKENS, tree=14).steps for p in prompts(8)]
    packed = packed_of(
        [[(p, tokens_of(steps))] for p, steps in zip(prompts(8), loops, strict=True)]
    )
    documents = join_documents(
        [
            Document(packed.ids[packed.doc == i], packed.answer_mask[packed.doc == i], str(i))
            for i in range(8)
        ]
    )
    steps = replay_of(pair, 512).tree_steps(documents, [shape])[shape]
    assert_equal_steps(steps, loops)
    assert acceptance_length(steps) > 1.5


def test_a_dependency_changes_drafts():
    """Otherwise the tests above would not cover it. The first draft of a block stays the same."""
    pair = trained("p-eagle", 48, "dependency")
    packed = packed_of([[(p, tokens_of(loop(pair, p, 5)))] for p in prompts(8)])
    _, normed, drafts = next(iter(replay_of(pair).anchor_drafts(packed, 5)))
    plain = pair.drafter.greedy_token_ids(normed.flatten(0, 1)).view_as(drafts)
    assert (
        torch.equal(plain[:, 0], drafts[:, 0])
        and (plain[:, 1:] != drafts[:, 1:]).float().mean() > 0.02
    )


@pytest.mark.parametrize("method", METHODS)
def test_replay_of_a_sampled_answer(method: Method):
    pair, loops = trained(method), []
    for seed, prompt in enumerate(prompts(8)):
        loops.append(loop(pair, prompt, 4, Sampling(temperature=1.0, seed=seed)))
    packed = packed_of(
        [[(p, tokens_of(steps))] for p, steps in zip(prompts(8), loops, strict=True)]
    )
    assert_equal_steps(replayed(pair, packed, 4), loops)
    greedy = [tokens_of(loop(pair, p, 4)) for p in prompts(8)]
    assert greedy != [tokens_of(steps) for steps in loops]
    assert any(step.accepted for steps in loops for step in steps[1:])


@pytest.mark.parametrize("method", METHODS)
def test_several_turns(method: Method):
    """Each answer is replayed by itself; drafts end before the prompt of the next turn."""
    pair, loops, conversations = trained(method), [], []
    for first, second in zip(prompts(4), prompts(8)[4:], strict=True):
        turns: Turns = []
        for prompt in (first, second):
            before = [token for turn in turns for part in turn for token in part]
            loops.append(loop(pair, before + prompt, 4, tokens=20))
            turns.append((prompt, tokens_of(loops[-1])))
        conversations.append(turns)
    assert_equal_steps(replayed(pair, packed_of(conversations), 4), loops)


def test_one_token_answers_and_answers_without_a_prompt():
    """Both have no drafts: the first token comes from the prefill, which needs a prompt."""
    pair = trained("p-eagle")
    steps = loop(pair, prompts(1)[0], 4)
    whole = (prompts(1)[0], tokens_of(steps))
    packed = packed_of([[([7, 8], [9])], [([], [5, 6, 7, 8])], [whole], [([7], [8])], [([], [3])]])
    assert_equal_steps(replayed(pair, packed, 4), [steps])


def test_worked_example():
    """The answer is tokens 2..7. Of anchor 1 (newest token 2), two drafts are right; of anchor 4
    (newest token 5), all up to the end of the answer are.
    """
    packed = packed_of([[([20, 21], [22, 23, 24, 25, 26, 27])], [([50, 51], [52, 53])]])
    anchors = np.array([1, 2, 3, 4, 5, 6, 9, 10])
    drafts = np.zeros((8, 4), dtype=np.int64)
    drafts[0] = [23, 24, 90, 26]  # A right draft after a wrong one does not count.
    drafts[3] = [26, 27, 50, 51]
    steps = replay_steps(packed, anchors, chain_matches(packed, anchors, drafts, 4), 4)
    assert steps == [Step((23, 24, 25), 4, 2), Step((26, 27), 4, 2), Step((53,), 4, 0)]
    assert acceptance_length(steps) == 1 + 4 / 3 and acceptance_length([]) == 1.0
    assert replay_steps(packed, anchors, chain_matches(packed, anchors, drafts, 1), 1)[0] == Step(
        (23, 24), 1, 1
    )


def test_answers_end_with_their_document():
    packed = packed_of([[([1], [2, 3])], [([4], [5, 6]), ([7], [8])]])
    assert answer_spans(packed) == [(1, 3), (4, 6), (7, 8)]


@pytest.mark.parametrize(
    ("method", "draft_vocab", "extension"),
    [  # The drafter with all extensions stands for those with one.
        pytest.param(*kind, marks=[] if kind[2] in ("", "all") else pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_groups_of_anchors_and_packs_do_not_matter(
    method: Method, draft_vocab: int, extension: str
):
    """The values of K in one call do not matter, either."""
    pair = trained(method, draft_vocab, extension)
    parts = []
    for i, prompt in enumerate(prompts(6)):
        ids = np.array(prompt + tokens_of(loop(pair, prompt, 4, tokens=20)))
        parts.append(Document(ids, np.arange(len(ids)) >= 4, str(i)))
    documents = join_documents(parts)
    whole = replay_of(pair).chain_steps(documents, [2, 4])
    assert replay_of(pair, 128, group_size=13).chain_steps(documents, [2, 4]) == whole
    assert len(whole[2]) > len(whole[4]) > 0
    assert replay_of(pair, group_size=13).chain_steps(documents, [2])[2] == whole[2]
    small = replay_of(pair, group_size=13, logit_rows=7)
    assert small.chain_steps(documents, [4])[4] == whole[4]
    with torch.no_grad():
        nothing = documents.subset(np.arange(0))
        assert replay_of(pair, 128).chain_steps(nothing, [3]) == {3: []}
