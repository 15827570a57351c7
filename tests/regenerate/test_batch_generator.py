"""Continuous batching gives the answers of plain generation, for every architecture."""

from collections import Counter

import pytest
import torch

from peagle.regenerate.batch_generator import BatchAnswer, BatchGenerator, BatchRequest
from peagle.regenerate.repetition import is_looping
from peagle.target import Target
from tests.support.engine.statistics import chi_square_p_value
from tests.support.models.chat_targets import plain
from tests.support.models.tiny_models import make_target

SIZES = [3, 17, 1, 40, 9, 33, 2, 64, 12, 5, 21]


def prompts(sizes: list[int] = SIZES) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, 96, (n,), generator=generator).tolist() for n in sizes]


def answers(
    target: Target, requests: list[BatchRequest], slots: int, capacity: int = 128, seed: int = 0
) -> dict:
    results = list(BatchGenerator(target, slots, capacity, seed).run(iter(requests)))
    assert len(results) == len(requests)
    return {answer.key: answer for answer in results}


def test_equals_plain_generation(any_target: Target) -> None:
    """More requests than slots, with prompts and answers of different lengths.

    Answers that loop are compared up to their end.
    """
    limits = [20, 7, 33, 1, 12, 25]
    requests = [BatchRequest(i, ids, limits[i]) for i, ids in enumerate(prompts(SIZES[:6]))]
    results = answers(any_target, requests, slots=3)
    for request in requests:
        expected, answer = plain(any_target, request.ids, request.max_tokens), results[request.key]
        assert answer.ids == expected
        assert answer.reason == ("stop" if expected[-1] in any_target.stop_ids else "length")


def test_answers_end_with_any_stop_token() -> None:
    target = make_target()
    free = {i: plain(target, ids, 30) for i, ids in enumerate(prompts())}
    target.model.generation_config.eos_token_id = sorted({ids[4] for ids in free.values()})
    results = answers(
        target, [BatchRequest(i, ids, 30) for i, ids in enumerate(prompts())], slots=3
    )
    for i, answer in results.items():
        end = next(n for n, token in enumerate(free[i]) if token in target.stop_ids)
        assert answer == BatchAnswer(i, free[i][: end + 1], "stop")


def test_an_answer_does_not_depend_on_its_neighbors(target: Target) -> None:
    requests = [BatchRequest(i, ids, 24) for i, ids in enumerate(prompts())]
    alone = {r.key: answers(target, [r], slots=1)[r.key].ids for r in requests}
    for slots in (2, 5, 16):
        assert {
            key: answer.ids for key, answer in answers(target, requests, slots).items()
        } == alone
    hot = [BatchRequest(("hot", r.key), r.ids, 24, temperature=1.5) for r in requests]
    mixed = answers(target, [r for pair in zip(requests, hot, strict=True) for r in pair], slots=4)
    assert {r.key: mixed[r.key].ids for r in requests} == alone
    assert any(mixed["hot", key].ids != ids for key, ids in alone.items())


def test_samples_follow_the_targets_distribution(target: Target) -> None:
    """First tokens at temperature 1.3 follow the target's probabilities (chi-square test)."""
    ids, temperature, draws = prompts([9])[0], 1.3, 3000
    results = answers(
        target,
        [BatchRequest(i, ids, 1, temperature) for i in range(draws)],
        slots=64,
        capacity=32,
        seed=5,
    )
    counts = Counter(answer.ids[0] for answer in results.values())
    probabilities = torch.softmax(
        target.forward(torch.tensor(ids), keep=1).logits[0].double() / temperature, 0
    )
    assert probabilities.min() * draws >= 5  # Every outcome is expected at least five times.
    observed = [counts[token] for token in range(len(probabilities))]
    assert chi_square_p_value(observed, (probabilities * draws).tolist()) > 0.001


def test_sampling_is_reproducible_with_a_seed(target: Target) -> None:
    requests = [BatchRequest(i, ids, 12, 1.0) for i, ids in enumerate(prompts())]
    first, again, other = (answers(target, requests, slots=4, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_answers_may_add_requests(target: Target) -> None:
    """An exhausted iterator is polled again, so answers can lead to second turns."""

    class Turns:
        def __init__(self) -> None:
            self.ready = [BatchRequest((i, 0), ids, 8) for i, ids in enumerate(prompts())]

        def __iter__(self) -> "Turns":
            return self

        def __next__(self) -> BatchRequest:
            if not self.ready:
                raise StopIteration
            return self.ready.pop(0)

    turns, results = Turns(), {}
    for answer in BatchGenerator(target, 4, 128).run(turns):
        (i, turn), ids = answer.key, prompts()[answer.key[0]]
        results[answer.key] = answer.ids
        if turn == 0:
            turns.ready.append(BatchRequest((i, 1), [*ids, *answer.ids, 7], 8))
    assert len(results) == 2 * len(SIZES)
    for i, ids in enumerate(prompts()):
        assert results[i, 1] == plain(target, [*ids, *results[i, 0], 7], 8)


def test_looping_answers_are_ended(target: Target) -> None:
    """Answers of a tiny random target soon loop, and are ended before their limit."""
    target = make_target(eos_token_id=None)
    target.model.generation_config.eos_token_id = None
    requests = [BatchRequest(i, ids, 150) for i, ids in enumerate(prompts([5, 9, 30]))]
    results = answers(target, requests, slots=2, capacity=200)
    for request in requests:
        expected, answer = plain(target, request.ids, 150), results[request.key]
        assert answer.ids == expected[: len(answer.ids)]
        assert (answer.reason == "loop") == is_looping(answer.ids)
        assert is_looping(expected) == (answer.reason == "loop")
        assert answer.reason == "loop" or len(answer.ids) == 150
    assert any(answer.reason == "loop" and len(answer.ids) < 150 for answer in results.values())


@pytest.mark.parametrize("period", [1, 2, 7, 12, 13, 24])
def test_is_looping(period: int) -> None:
    once, run = list(range(100, 100 + period)), max(48, 4 * period)
    loop = (once * run)[:run]
    assert is_looping(loop)
    assert is_looping([1, 2, 3, *loop])
    assert is_looping([*loop, 1, 2, 3])
    assert not is_looping(loop[:-1])
    assert not is_looping([*loop[: run // 2], 5, *loop[run // 2 : -1]])
    assert not is_looping([])
    assert not is_looping(list(range(200)))
    assert not is_looping((list(range(25)) * 20)[:300])


def test_on_step_counts_tokens_and_the_target_is_restored(target: Target) -> None:
    seen: list[int] = []
    before = target.model.config._attn_implementation
    generator = BatchGenerator(target, 3, 128)
    total = sum(
        len(a.ids)
        for a in generator.run(
            iter([BatchRequest(0, [5, 6], 9), BatchRequest(1, [7], 14)]), seen.append
        )
    )
    assert seen == sorted(seen) and seen[-1] == total == generator.finished_tokens
    assert target.model.config._attn_implementation == before
    left = generator.run(iter([BatchRequest(i, ids, 30) for i, ids in enumerate(prompts())]))
    next(left)
    assert target.model.config._attn_implementation == before
    left.close()
    assert target.model.config._attn_implementation == before
    again = {a.key: a.ids for a in generator.run(iter([BatchRequest(0, [5, 6], 9)]))}
    assert again[0] == plain(target, [5, 6], 9)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt-oss"])
def test_equals_plain_generation_on_cuda(name: str) -> None:
    """CUDA graphs and, where supported, the kernel give the float32 answers of the CPU."""
    target, device = make_target(name), make_target(name)
    device.model.to("cuda")
    requests = [BatchRequest(i, ids, 30) for i, ids in enumerate(prompts())]
    generator = BatchGenerator(device, 4, 128)
    results = {answer.key: answer.ids for answer in generator.run(iter(requests))}
    assert results == {r.key: plain(target, r.ids, 30) for r in requests}
    assert name == "gpt-oss" or set(generator.step.graphs.graphs) == {True, False}
