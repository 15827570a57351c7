"""Draft trees have the most likely nodes, and do not change answers."""

import itertools
import random
from collections import Counter
from itertools import chain

import pytest
import torch

from peagle.draft_shape import MAX_TREE_NODES, NO_DRAFT, DraftShape
from peagle.engine.batch import verifiable_shape
from peagle.engine.policy.accepted import AcceptedCounts, accepted_counts
from peagle.engine.policy.adaptive import AdaptivePolicy
from peagle.engine.policy.candidates import candidate_shapes
from peagle.engine.sizing import max_draft_k
from peagle.errors import UserError
from peagle.kernels.slot_state import SlotBatch, SlotState
from peagle.kernels.triton.accept_tree import accept_tree
from peagle.kernels.triton.build_tree import DraftTrees, tree_topology
from peagle.loaded import LoadedPair
from peagle.target import Target
from tests.support.engine.decoding import tokens_of, transformers_generate
from tests.support.engine.engines import (
    COUNT,
    MIXED,
    REQUESTS,
    ask,
    engine_of,
    one_by_one,
    pair_of,
    reference_steps,
    serve,
    small,
    some_requests,
    steps_of,
)
from tests.support.engine.planting import plant_trees
from tests.support.engine.sampling import OPTIONS, PROMPT, target, three_tokens
from tests.support.engine.statistics import p_value
from tests.support.models.tiny_models import make_drafter, make_target

K = 4
NODES = 12


def test_a_tree_has_the_most_likely_nodes() -> None:
    """Compare with all continuations, where each token depends on the one before it."""
    logp = torch.randn(1, 3, 5, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    sums = {}
    for depth in (1, 2, 3):
        for path in itertools.product(range(5), repeat=depth):
            sums[path] = sum(
                float(logp[0, i, path[i - 1] if i else 0, token]) for i, token in enumerate(path)
            )
    best = sorted(sums, key=lambda path: -sums[path])[:20]
    tree = tree_topology(logp, 20)
    paths = [()]
    for node in range(20):
        paths.append((*paths[tree.parents[0, node]], int(tree.candidates[0, node])))
        assert len(paths[-1]) == tree.depths[0, node] and tree.parents[0, node] <= node
        ancestors = {row for row in range(node + 2) if tree.masks[0, node + 1] >> row & 1}
        assert ancestors == {
            row for row, path in enumerate(paths) if paths[-1][: len(path)] == path
        }
    assert paths[1:] == best
    assert [x[:, :10].tolist() for x in tree_topology(logp, 20)[:3]] == [
        x.tolist() for x in tree_topology(logp, 10)[:3]
    ]


def test_shapes() -> None:
    assert DraftShape(7, 7).is_chain and NO_DRAFT.is_chain and not DraftShape(7, 32).is_chain
    for k, nodes in ((7, 3), (1, 5), (7, MAX_TREE_NODES + 1)):
        with pytest.raises(UserError, match="tree of"):
            DraftShape(k, nodes)
    big = DraftShape(7, 32)
    small = DraftShape(7, 16)
    chained = DraftShape(5, 5)
    assert verifiable_shape(big, [big, big]) == big and verifiable_shape(small, [big]) == small
    assert verifiable_shape(big, [small, big]) == small, (
        "the shape must be the largest that all requests have"
    )
    assert verifiable_shape(big, [chained]) == chained
    assert verifiable_shape(DraftShape(5, 5), [big]) == chained
    assert verifiable_shape(big, [NO_DRAFT]) == NO_DRAFT


@pytest.mark.parametrize(
    "tree, deep, k",
    [
        (0, False, 7),
        (0, True, 11),
        (31, True, 11),
        (31, False, 7),
        (12, True, 11),
        (10, True, 9),
        (8, True, 7),
    ],
)
def test_the_depth_of_adaptive_drafting(tree: int, deep: bool, k: int) -> None:
    """On a GPU rows are nearly free; a tree has more nodes than depths."""
    assert max_draft_k("auto", tree, small().pair.k, deep) == k
    assert candidate_shapes(k, tree)[-1] == DraftShape(k, tree or k)


# Every architecture.


@pytest.fixture(scope="module")
def branching(any_target: Target) -> LoadedPair:
    return pair_of(any_target, {"p-eagle": make_drafter(any_target, "p-eagle", 2)})


def test_accepted_drafts_do_not_change_answers(branching: LoadedPair) -> None:
    generated = [transformers_generate(branching.target, ids, COUNT) for ids, _ in REQUESTS]
    engine = engine_of(branching, "p-eagle", K, tree=NODES, kv_tokens=140)
    rng = random.Random(1)
    streams = [engine.add(ids, id=str(i), **settings) for i, (ids, settings) in enumerate(REQUESTS)]
    while engine.step():
        engine.check_integrity()
        plant_trees(engine, {str(i): answer for i, answer in enumerate(generated)}, rng, K, NODES)
    answers = [steps_of(stream) for stream in streams]
    assert [tokens_of(steps) for steps in answers] == generated
    assert {step.accepted for step in chain(*answers)} >= {0, 1, 2, 3}
    assert engine.metrics.k_steps[NODES] == engine.metrics.steps


# A pair whose drafts are accepted.


@pytest.mark.parametrize("nodes", [2 * NODES, 40])
def test_trees_accept_more_and_do_not_change_answers(nodes: int) -> None:
    requests = some_requests(12, seed=1, max_tokens=30, ignore_eos=True)
    engine = engine_of(small(), "p-eagle", K, tree=nodes, kv_tokens=400)
    assert engine.loop.stepper.drafter is not None
    # After 45 training steps, the probabilities of a drafter are too low.
    engine.loop.stepper.drafter.branching.calibration = (4.0,)
    answers = serve(engine, requests)
    expected = [
        reference_steps(small(), "p-eagle", ids, K, **settings) for ids, settings in requests
    ]
    assert [tokens_of(steps) for steps in answers] == [tokens_of(steps) for steps in expected]
    chains = engine_of(small(), "p-eagle", K, kv_tokens=400)
    serve(chains, requests)
    assert engine.metrics.acceptance_length > 1.02 * chains.metrics.acceptance_length


@pytest.mark.parametrize("k", [K, "auto"])
def test_a_seed_gives_the_same_answer_in_any_batch(k: int | str) -> None:
    requests = list(enumerate(MIXED))
    random.Random(2).shuffle(requests)
    engine = engine_of(small(), "p-eagle", k, tree=NODES, kv_tokens=200)
    answers = serve(engine, [each for _, each in requests])
    assert [tokens_of(steps) for steps in answers] == [one_by_one()[i] for i, _ in requests]
    assert engine.metrics.k_steps[NODES]


@pytest.mark.parametrize("left", [1, 2, K, NODES])
def test_answers_fill_the_context(left: int, prompt) -> None:
    """Nodes may be beyond the end of the context, but tokens may not."""
    context = small().target.context
    ids = prompt(context - left)
    engine = engine_of(small(), "p-eagle", K, tree=NODES, kv_tokens=None)
    tokens, pieces = ask(engine, ids, max_tokens=99, ignore_eos=True)
    assert tokens == tokens_of(
        reference_steps(small(), "none", ids, max_tokens=99, ignore_eos=True)
    )
    assert len(tokens) == left and pieces[-1].reason == "length"


def test_logprobs_are_those_of_the_accepted_path() -> None:
    requests = [
        (ids, settings | {"logprobs": 2})
        for ids, settings in some_requests(5, seed=4, max_tokens=12)
    ]
    results = []
    for options in ({"method": "none"}, {"method": "p-eagle", "k": K, "tree": NODES}):
        engine = engine_of(small(), kv_tokens=300, **options)
        streams = [engine.add(ids, **settings) for ids, settings in requests]
        engine.drain()
        results.append([each for stream in streams for piece in stream for each in piece.logprobs])
    plain, with_trees = ([(each.token, each.rank) for each in result] for result in results)
    assert plain == with_trees
    logprobs = (torch.tensor([each.logprob for each in result]) for result in results)
    torch.testing.assert_close(*logprobs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS.keys())
def test_samples_follow_the_processed_distribution(option: dict) -> None:
    """Random trees, 4,000 seeds, all answers of three tokens: chi-square test at level 1e-3."""
    runs = 4000
    vocab = 6
    nodes = 7
    exact, sampler = three_tokens(option, runs, vocab)
    outputs: list[list[int]] = [[] for _ in range(runs)]
    accepted = 0
    rng = torch.Generator().manual_seed(0)
    while min(map(len, outputs)) < 3:
        tree = tree_topology(torch.randn(runs, 2, 1, 4, generator=rng), nodes)
        # Four of six tokens are candidates at each depth.
        drafts = torch.rand(runs, 2, vocab, generator=rng).argsort(-1)
        drafts = drafts[torch.arange(runs)[:, None], tree.depths.long() - 1, tree.candidates]
        rows = torch.stack(
            [torch.stack(rows_of(outputs[b], drafts[b], tree.masks[b], vocab)) for b in range(runs)]
        )
        emitted = torch.tensor([len(output) for output in outputs], dtype=torch.int32)
        tokens = sampler.choose(rows, drafts, emitted, tree.masks)
        ids = torch.cat([torch.zeros(runs, 1, dtype=torch.long), drafts], 1)
        first, ends, nothing = (torch.full((runs,), n, dtype=torch.int32) for n in (0, 99, 0))
        trees = DraftTrees(drafts[:, :2], drafts, tree.parents, tree.depths, tree.masks)
        walked = accept_tree(
            tokens,
            torch.zeros(tokens.shape),
            ids,
            trees,
            SlotBatch(torch.arange(runs), first, ends),
            SlotState(nothing[:, None], nothing, ends, nothing.clone(), nothing.long()),
            2,
        )
        path_tokens = walked.packed[:, :3]
        sampler.commit(path_tokens, walked.accepted_counts)
        accepted += int(walked.accepted_counts.sum())
        for b in range(runs):
            outputs[b] += path_tokens[b, : walked.accepted_counts[b] + 1].tolist()
    assert accepted > runs
    assert p_value(Counter(tuple(output[:3]) for output in outputs), exact, runs) > 1e-3


def rows_of(
    output: list[int], drafts: torch.Tensor, masks: torch.Tensor, vocab: int
) -> list[torch.Tensor]:
    """The target's logits at every row of a tree."""
    paths = [
        [token for row, token in enumerate(drafts.tolist(), 1) if mask >> row & 1]
        for mask in masks.tolist()
    ]
    return [target(PROMPT + output + path, vocab) for path in paths]


@pytest.mark.parametrize("bidirectional", [False, True])
def test_chunked_prompts_give_the_same_kv_cache(bidirectional: bool, prompt) -> None:
    """Mask rows attend to each other; the rows of an unfinished prompt do not."""
    target = make_target(seed=7)
    drafter = make_drafter(target, "p-eagle", 3, bidirectional=bidirectional)
    pair = pair_of(target, {"p-eagle": drafter})
    ids = prompt(50)
    caches = []
    for chunk in (512, 16):
        engine = engine_of(
            pair, "p-eagle", 5, page_size=16, prefill_chunk=chunk, kv_tokens=400, max_batch=1
        )
        engine.add(ids, max_tokens=8, ignore_eos=True)
        while not any(request.status == "decode" for request in engine.loop.scheduler.running):
            engine.step()
        pages = engine.loop.scheduler.running[0].pages
        slots = [pages[position // 16] * 16 + position % 16 for position in range(50)]
        caches.append(torch.stack([keys[slots] for keys in engine.loop.stepper.kv_cache.keys[-3:]]))
    torch.testing.assert_close(*caches, rtol=1e-4, atol=1e-4)


def test_a_slot_without_a_tree_is_harmless() -> None:
    """With copies of one node, no row outside of the block is read."""
    rows = 9
    k = 3
    parents = torch.zeros(1, 8).int()
    depths = torch.ones(1, 8).int()
    masks = torch.full((1, 9), 3)
    ids = tokens = torch.full((1, rows), 7)
    zero = torch.zeros(1, dtype=torch.int32)
    trees = DraftTrees(ids, ids, parents, depths, masks)
    walked = accept_tree(
        tokens,
        torch.zeros(1, rows),
        ids,
        trees,
        SlotBatch(torch.zeros(1).long(), zero, zero + 99),
        SlotState(zero[:, None], zero.clone(), zero + 99, zero.clone(), torch.zeros(1).long()),
        k,
    )
    assert walked.flat_rows is not None
    assert 0 <= walked.flat_rows.min() <= walked.flat_rows.max() < rows
    assert walked.accepted_counts.item() <= k


def test_a_grammar_restricts_adaptive_drafting_to_chains() -> None:
    policy = AdaptivePolicy(candidate_shapes(7, 31))
    chosen = Counter[DraftShape]()
    for _ in range(200):
        shape = policy.choose(1, chains_only=True).shape
        counts = accepted_counts(min(shape.k, 2), ())
        policy.observe(1, shape, 0.001 * (1 + shape.nodes / 8), [counts])
        chosen[shape] += 1
    assert all(shape.is_chain for shape in chosen) and chosen[DraftShape(2, 2)] > 120


@pytest.mark.parametrize("nodes", [0, 31])
def test_wrong_draft_confidence_is_ignored(nodes: int) -> None:
    policy = AdaptivePolicy(candidate_shapes(7, nodes))
    last = Counter[DraftShape]()
    for step in range(1500):
        shape = policy.choose(1, [0.9] * 7).shape
        policy.observe(1, shape, 0.001 * (1 + shape.nodes / 8), [AcceptedCounts(0, 0, 1)])
        last[shape] += step >= 1000
    assert last[NO_DRAFT] > 400


def test_unsupported_trees_are_refused() -> None:
    for options, words in (
        ({"method": "eagle3", "k": 3, "tree": 8}, "p-eagle drafter"),
        ({"k": 3, "tree": 8, "exact": True}, "`exact`"),
        ({"k": 8, "tree": 5}, "more nodes than K"),
        ({"k": 3, "tree": 99}, "at most"),
        ({"k": 3, "tree": 31, "kv_tokens": 16}, "`kv_tokens`"),
    ):
        with pytest.raises(UserError, match=words):
            engine_of(small(), **{"method": "p-eagle"} | options)
