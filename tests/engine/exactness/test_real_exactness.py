"""Exact mode on a released pair in bfloat16: answers under load equal those of single requests.

`python -m benchmarks.exact.load OUT` is a longer test on a GPU.
"""

from pathlib import Path

import pytest

from peagle.loaded import LoadedPair, load
from tests.support.engine.decoding import tokens_of
from tests.support.engine.engines import EngineRequest, engine_of, serve
from tests.support.kernels.cpu_features import needs_c

PROMPTS = (Path(__file__).parents[2] / "support" / "prompts.txt").read_text().splitlines()[:3]
PAGE = 8
CONTEXT = 72  # The longest prompt with its answer fits.
KV_TOKENS = 128  # 16 pages, less than half of what the six requests need


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    return load("smollm2-135m", dtype="bfloat16", device="cpu")


@pytest.fixture(scope="module")
def requests(pair: LoadedPair) -> list[EngineRequest]:
    """Every prompt twice: greedy, and sampled with a seed."""
    limits = {"max_tokens": 12, "ignore_eos": True}
    return [
        (pair.encode(text), limits | sampling)
        for seed, text in enumerate(PROMPTS)
        for sampling in ({}, {"temperature": 0.8, "top_p": 0.95, "seed": seed})
    ]


@pytest.fixture(scope="module")
def expected(pair: LoadedPair, requests: list[EngineRequest]) -> list[list[int]]:
    """Answers of single requests, without drafts, chunks and a prefix cache."""
    options = {"page_size": PAGE, "prefix_caching": False, "max_batch": 1}
    engine = engine_of(
        pair, "none", exact=True, kv_tokens=CONTEXT, prefill_chunk=CONTEXT, **options
    )
    answers = [tokens_of(serve(engine, [request])[0]) for request in requests]
    assert answers[0] != answers[1], "sampling must change an answer"
    return answers


@needs_c
@pytest.mark.parametrize(
    ("k", "tree"),
    [
        pytest.param(7, 15, id="tree"),
        pytest.param(7, 0, id="chain", marks=pytest.mark.slow),
        pytest.param("auto", 15, id="auto", marks=pytest.mark.slow),
    ],
)
def test_answers_under_load_equal_single_requests(
    pair: LoadedPair,
    requests: list[EngineRequest],
    expected: list[list[int]],
    k: int | str,
    tree: int,
) -> None:
    """Staggered arrival, chunks of prompts, shared prefixes, and pages for half of the requests."""
    options = {"page_size": PAGE, "kv_tokens": KV_TOKENS, "prefill_chunk": 64, "max_batch": 6}
    engine = engine_of(pair, "p-eagle", k, tree=tree, exact=True, **options)
    assert engine.exact_mode == "batched"
    batches: list[int] = []
    engine.on_step(lambda record: batches.append(record.batch))
    assert [tokens_of(steps) for steps in serve(engine, requests)] == expected
    assert max(batches) > 1 and engine.metrics.acceptance_length > 1.3
    status = engine.status()
    assert status["prefix_hits"] > 0
    # A chain, which adaptive drafting may choose, is admitted with pages for most of its answer.
    assert status["preemptions"] > 0 or k == "auto" or not tree
