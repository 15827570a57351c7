"""The sampler: a batch with drafts has the tokens of transformers' logits processors."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.core import Sampling
from peagle.engine.sampling import row_softmax
from peagle.engine.sampling.row_softmax import log_softmax, softmax
from peagle.engine.sampling.sampler import Sampler, logprobs
from peagle.engine.sampling.sampling_state import SamplingState
from peagle.errors import UserError
from peagle.kernels.triton.accept import pack_step_output
from peagle.kernels.triton.argmax import argmax
from peagle.kernels.triton.draw_tokens import CDF_UNITS, cumulative_units
from peagle.reference.sampling_rule import choose, uniforms
from tests.support.engine.sampling import (
    OPTIONS,
    PROMPT,
    STOPS,
    TABLE,
    processed,
    target,
    three_tokens,
)
from tests.support.engine.statistics import p_value


def expected_tokens(
    prompt: list[int], sampling: Sampling, min_tokens: int, count: int
) -> list[int]:
    noise = uniforms(sampling.seed, count)
    output: list[int] = []
    while len(output) < count:
        logits = processed(prompt, output, sampling, min_tokens)
        output.append(int(choose(logits, sampling, noise[len(output)][None])))
    return output


def speculate(
    batch_requests: list[tuple[list[int], Sampling, int]], answers: list[list[int]], seed: int
) -> list[list[int]]:
    """A small engine loop with right and wrong drafts; the batch shrinks and changes order."""
    random = np.random.default_rng(seed)
    outputs: list[list[int]] = [[] for _ in batch_requests]
    states = [
        SamplingState(sampling, prompt, len(answer), vocab=9, min_tokens=minimum, stop_ids=STOPS)
        for (prompt, sampling, minimum), answer in zip(batch_requests, answers, strict=True)
    ]
    while batch := [i for i, answer in enumerate(answers) if len(outputs[i]) < len(answer)]:
        random.shuffle(batch)
        sampler = Sampler([states[i] for i in batch])
        for _ in range(2):
            k = int(random.integers(0, 4))
            rows = [
                step(batch_requests[i][0] + outputs[i], answers[i][len(outputs[i]) :], k, random)
                for i in batch
            ]
            drafts = torch.tensor([drafts for drafts, _ in rows], dtype=torch.int64).reshape(
                len(batch), k
            )
            emitted = torch.tensor([len(outputs[i]) for i in batch], dtype=torch.int32)
            tokens = sampler.choose(torch.stack([logits for _, logits in rows]), drafts, emitted)
            accepted = (drafts == tokens[:, :k]).cumprod(1).sum(1)
            sampler.commit(tokens, accepted)
            for row, i in enumerate(batch):
                outputs[i] += tokens[row, : accepted[row] + 1].tolist()
    return [output[: len(answer)] for output, answer in zip(outputs, answers, strict=True)]


def step(
    ids: list[int], next_: list[int], k: int, random: np.random.Generator
) -> tuple[list[int], torch.Tensor]:
    drafts = [
        d if random.random() < 0.7 else int(random.integers(9)) for d in (next_ + [0] * k)[:k]
    ]
    return drafts, torch.stack([target(ids + drafts[:i]) for i in range(k + 1)])


penalty = st.sampled_from([0.0, 0.0, -1.5, 0.3, 2.0])
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    top_k=st.sampled_from([0, 1, 3, 8, 50]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 99),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    presence_penalty=penalty,
    frequency_penalty=penalty,
    logit_bias=st.dictionaries(
        st.integers(0, 8), st.sampled_from([-100.0, -1.0, 2.5, 100.0]), max_size=3
    ),
)
requests = st.tuples(
    st.lists(st.integers(0, 8), min_size=1, max_size=6), samplings, st.sampled_from([0, 3, 12])
)


@settings(max_examples=60)
@given(st.lists(requests, min_size=1, max_size=5), st.integers(0, 9))
def test_a_batch_with_drafts_equals_single_requests(batch_requests, seed: int) -> None:
    answers = [expected_tokens(*request, count=10) for request in batch_requests]
    assert speculate(batch_requests, answers, seed) == answers


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS.keys())
def test_samples_follow_the_processed_distribution(option: dict) -> None:
    """Random drafts, 4,000 seeds, all answers of three tokens: chi-square test at level 1e-3."""
    runs = 4000
    vocab = 6
    random = np.random.default_rng(0)
    exact, sampler = three_tokens(option, runs, vocab)
    outputs: list[list[int]] = [[] for _ in range(runs)]
    total = 0
    while min(map(len, outputs)) < 3:
        drafts = random.integers(0, vocab, (runs, 2))
        rows = [
            [target(PROMPT + outputs[b] + drafts[b, :i].tolist(), vocab) for i in range(3)]
            for b in range(runs)
        ]
        emitted = torch.tensor([len(output) for output in outputs], dtype=torch.int32)
        tokens = sampler.choose(
            torch.stack([torch.stack(row) for row in rows]), torch.from_numpy(drafts), emitted
        )
        accepted = (torch.from_numpy(drafts) == tokens[:, :2]).cumprod(1).sum(1)
        sampler.commit(tokens, accepted)
        total += int(accepted.sum())
        for b in range(runs):
            outputs[b] += tokens[b, : accepted[b] + 1].tolist()
    assert total > runs / 10
    assert p_value(Counter(tuple(output[:3]) for output in outputs), exact, runs) > 1e-3


def test_states_survive_a_change_of_the_batch() -> None:
    penalized = [
        SamplingState(Sampling(presence_penalty=1.0), PROMPT, 9, vocab=9, output=output)
        for output in ([2, 2], [])
    ]
    tokens = torch.tensor([[5, 6, 7], [8, 8, 0]])
    Sampler(penalized).commit(tokens, torch.tensor([1, 2]))
    Sampler(penalized[::-1]).commit(tokens, torch.tensor([0, 0]))
    assert [state.counts.tolist() for state in penalized] == [
        [0, 0, 2, 0, 0, 1, 1, 0, 1],
        [1, 0, 0, 0, 0, 1, 0, 0, 2],
    ]


def test_only_rows_with_options_are_processed() -> None:
    plain = [SamplingState(Sampling(), PROMPT, 5, vocab=9, min_tokens=5) for _ in range(3)]
    assert not Sampler(plain).groups
    assert not hasattr(plain[0], "counts") and not hasattr(plain[0], "uniforms")
    warm = SamplingState(Sampling(temperature=1.0, seed=0), PROMPT, 5, vocab=9)
    sampler = Sampler(
        [*plain, warm, SamplingState(Sampling(presence_penalty=1.0), PROMPT, 5, vocab=9)]
    )
    assert [group.rows.tolist() for group in sampler.groups] == [[4], [3]]


def test_raw_logits_are_not_changed() -> None:
    logits = TABLE[:6].reshape(2, 3, 9).bfloat16()
    before = logits.clone()
    sampling = Sampling(
        temperature=0.7, top_p=0.8, repetition_penalty=1.5, logit_bias={2: 4.0}, seed=1
    )
    sampler = Sampler([SamplingState(sampling, PROMPT, 4, vocab=9) for _ in range(2)])
    tokens = sampler.choose(
        logits, torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    )
    assert tokens.dtype == torch.int64 and torch.equal(logits, before)


def test_large_batches_are_processed_in_parts() -> None:
    logits = TABLE[:21].reshape(7, 3, 9)
    emitted = torch.arange(7, dtype=torch.int32)
    drafts = torch.randint(9, (7, 2), generator=torch.Generator().manual_seed(0))

    def tokens(**options: int) -> torch.Tensor:
        settings = [Sampling(temperature=i % 3, seed=i, frequency_penalty=0.5) for i in range(7)]
        states = [SamplingState(sampling, PROMPT, 9, vocab=9) for sampling in settings]
        return Sampler(states, **options).choose(logits, drafts, emitted)

    assert torch.equal(tokens(max_group_logits=20), tokens())


def test_logprobs_are_those_of_raw_logits() -> None:
    logits = TABLE[:4].reshape(2, 2, 9)
    tokens = torch.tensor([[0, 3], [8, 8]])
    result = logprobs(logits, tokens, 3)
    exact = logits.log_softmax(-1)
    torch.testing.assert_close(result.chosen, exact.gather(-1, tokens[..., None])[..., 0])
    torch.testing.assert_close(result.values, exact.sort(descending=True).values[..., :3])
    assert torch.equal(result.ids, exact.argsort(descending=True)[..., :3])
    assert torch.equal(
        result.rank, (exact.argsort(descending=True) == tokens[..., None]).int().argmax(-1) + 1
    )
    assert logprobs(logits, tokens, 0).ids.shape == (2, 2, 0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """PyTorch splits a single row among threads only if there is more than one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("vocab", [50257, 49152])
def test_probabilities_of_a_row_do_not_depend_on_the_batch(
    vocab: int, device: str, two_threads: None
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(24, 1, vocab, generator=generator)).to(device)
    tokens = torch.arange(24, device=device)[:, None]
    for compute in (softmax, log_softmax):
        rows = [compute(row[None].clone()) for row in logits]
        assert torch.equal(compute(logits), torch.cat(rows))
    together = logprobs(logits, tokens, 5)
    single = [logprobs(row[None].clone(), tokens[i][None], 5) for i, row in enumerate(logits)]
    for field, parts in zip(together, zip(*single, strict=True), strict=True):
        assert torch.equal(field, torch.cat(parts))


def test_padding_does_not_change_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, rows of an odd vocabulary are padded."""
    logits = TABLE[:4].reshape(2, 2, 9)
    padded = torch.nn.functional.pad(logits, (0, 3), value=-torch.inf)
    monkeypatch.setattr(row_softmax, "aligned", lambda _: padded)
    torch.testing.assert_close(softmax(logits), logits.softmax(-1))
    torch.testing.assert_close(log_softmax(logits), logits.log_softmax(-1))


def test_rows_that_are_not_finite_are_detected() -> None:
    logits = torch.zeros(5, 2, 4)
    logits[1, 1, 2] = torch.nan
    logits[2, 0] = -torch.inf
    logits[3, 0, :3] = -torch.inf
    logits[4, 1, 0] = torch.inf
    tops = argmax(logits.flatten(0, 1))[1].view(5, 2)
    packed = pack_step_output(torch.zeros(5, 2).long(), tops, torch.ones(5))
    assert packed.tolist()[4] == [0, 0, 1, 1]
    assert packed[:, -1].tolist() == [0, 1, 1, 0, 1]


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="vocabulary ends at 8"):
        SamplingState(Sampling(logit_bias={9: 1.0}), PROMPT, 4, vocab=9)


@pytest.mark.parametrize(
    "bad",
    [
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.5},
        {"frequency_penalty": float("nan")},
        {"logit_bias": {3: 101.0}},
        {"logit_bias": {-1: 1.0}},
    ],
)
def test_bad_settings_are_refused(bad: dict) -> None:
    with pytest.raises(UserError, match=next(iter(bad))):
        Sampling(**bad)


def test_sampling_is_hashable_and_its_bias_is_immutable() -> None:
    mine = {5: 1.0}
    sampling = Sampling(logit_bias=mine)
    mine[6] = 2.0
    assert sampling == Sampling(logit_bias={5: 1.0}) and hash(sampling) == hash(
        Sampling(logit_bias={5: 1.0})
    )
    assert (
        sampling != Sampling()
        and Sampling().plain
        and not sampling.plain
        and not sampling.penalized
    )
    with pytest.raises(TypeError):
        sampling.logit_bias[5] = 0.0  # type: ignore[index]


@pytest.mark.gpu
def test_the_host_does_not_synchronize() -> None:
    options = [
        Sampling(),
        Sampling(0.8, 0.9, 5, 0.1, 3, 1.2, 0.5, 0.5, {2: 1.0}),
        Sampling(presence_penalty=1.0),
    ]
    answers = []
    for device in ("cpu", "cuda"):
        states = [
            SamplingState(s, PROMPT, 9, vocab=9, device=device, min_tokens=2, stop_ids=STOPS)
            for s in options
        ]
        logits = TABLE[:9].reshape(3, 3, 9).to(device)
        drafts = torch.zeros(3, 2, dtype=torch.int64, device=device)
        emitted, accepted = (torch.ones(3, dtype=torch.int32, device=device) for _ in range(2))
        torch.cuda.set_sync_debug_mode("error")
        try:
            sampler = Sampler(states)
            tokens = sampler.choose(logits, drafts, emitted)
            sampler.commit(tokens, accepted)
            again = sampler.choose(logits, drafts, emitted + 1)
            logprobs(logits, tokens, 2)
            tops = argmax(logits.flatten(0, 1))[1].view(logits.shape[:2])
            pack_step_output(tokens, tops, emitted)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        answers.append((tokens.tolist(), again.tolist()))
    assert answers[0] == answers[1]


def test_the_cdf_is_an_exact_sum() -> None:
    """So the order of summation, which may depend on the number of rows, has no effect."""
    x = 4 * torch.randn(3, 2, 5000, generator=torch.Generator().manual_seed(0))
    cdf = cumulative_units(x.softmax(-1))
    exact = np.cumsum((x.softmax(-1).double() * CDF_UNITS).long().numpy().astype(object), axis=-1)
    assert (cdf.numpy() == exact).all()
    assert (cdf[..., -1] / CDF_UNITS - 1).abs().max() < 1e-5
