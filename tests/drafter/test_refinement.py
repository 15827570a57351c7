"""The refinement of a block: its passes, and equal drafts of the engine."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peagle.core import Sampling
from peagle.drafter import Drafter
from peagle.drafter.formats import compact
from peagle.errors import UserError
from peagle.reference.decode import decode
from peagle.reference.proposer import proposer_for
from peagle.target import Target
from peagle.train.objective.passes import DrafterPasses, PassCache
from tests.support.engine.decoding import tokens_of
from tests.support.engine.engines import K, engine_of, pair_of, serve
from tests.support.models.tiny_models import AUX, add_noise, make_drafter
from tests.support.train.training import make_run, prompts, some_answers, some_config, trained

BLOCK = 5


def with_noise(drafter: Drafter, factor: float = 0.3) -> Drafter:
    """A copy whose refinement has random weights and changes drafts."""
    drafter = copy.deepcopy(drafter)
    assert drafter.refinement is not None
    add_noise(drafter.refinement, factor)
    return drafter


def some_rows(drafter: Drafter, batch: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed [batch, BLOCK, d], newest [batch])"""
    generator = torch.Generator().manual_seed(1)
    normed = torch.randn(batch, BLOCK, drafter.config.hidden_size, generator=generator)
    return normed, torch.randint(0, 96, (batch,), generator=generator)


@pytest.mark.parametrize("passes", [1, 2])
def test_passes_equal_drafting_one_token_at_a_time(passes: int, target: Target) -> None:
    """After i passes, the first i drafts equal those of drafting one token at a time."""
    drafter = with_noise(make_drafter(target, "p-eagle", 1, 40, refinement=passes))
    one_pass = copy.copy(drafter)
    one_pass.config = replace(drafter.config, refinement=1)
    normed, newest = some_rows(drafter)
    drafts = drafter.drafts(drafter.refine(normed, newest))
    known = newest[:, None]
    for depth in range(passes):
        rows = normed[:, : depth + 1].flatten(0, 1)
        position = torch.arange(depth + 1).repeat(len(normed))

        def attend(layer, q, k, v, depth=depth):
            q, k, v = (x.view(len(normed), depth + 1, *x.shape[1:]) for x in (q, k, v))
            k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
            scores += torch.full_like(scores, -torch.inf).triu(1)
            return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(0, 1)

        refined = drafter.refine_rows(rows, known.flatten(), position, attend)
        last = refined.view(len(normed), depth + 1, -1)[:, -1]
        known = torch.cat([known, drafter.greedy_token_ids(last)[:, None]], 1)
    assert torch.equal(known[:, 1:], drafts[:, :passes])
    if passes == 2:
        assert not torch.equal(drafts, one_pass.drafts(one_pass.refine(normed, newest)))


def test_a_row_depends_on_earlier_rows_of_its_block(target: Target) -> None:
    drafter = with_noise(make_drafter(target, "p-eagle", 1, refinement=1))
    normed, newest = some_rows(drafter)
    refined = drafter.refine(normed, newest)
    torch.testing.assert_close(drafter.refine(normed[:, :2], newest), refined[:, :2])
    changed = normed.clone()
    changed[0, 3] += 1
    differs = (drafter.refine(changed, newest) - refined).abs().amax(-1) > 1e-4
    assert differs.tolist() == [[False] * 3 + [True] * 2, [False] * 5, [False] * 5]
    assert not torch.allclose(drafter.refine(normed, newest + 1)[:, 0], refined[:, 0])


def test_training_attends_in_one_dtype(target: Target) -> None:
    """Flex attention needs one dtype, but under autocast the angles are float32."""
    drafter = with_noise(make_drafter(target, "p-eagle", 1, refinement=1))
    normed, newest = (x[:, 0] if x.ndim > 1 else x for x in some_rows(drafter))
    passes = DrafterPasses(drafter, torch.bfloat16)
    _, cache = passes("refine_context", normed, newest, PassCache((), ()))
    assert [x.dtype for x in cache.tensors] == [torch.bfloat16] * 2


def test_wrong_numbers_of_passes(target: Target) -> None:
    for passes in (-1, 3):
        with pytest.raises(UserError, match=f"`refinement` is {passes}: use 0 to 2 passes"):
            make_drafter(target, "p-eagle", 1, refinement=passes)
    with pytest.raises(UserError, match="needs a p-eagle drafter"):
        make_drafter(target, "eagle3", 1, refinement=1)


def test_training_continues_with_more_passes(tmp_path: Path) -> None:
    """A plain drafter can get a refinement; its number of passes may change, but not to zero."""
    target, answers = some_answers()
    data = answers / "answers.jsonl"
    plain = make_drafter(target, "p-eagle", 1)
    compact.save(plain, tmp_path / "0", target)
    drafter = make_drafter(target, "p-eagle", 1, refinement=1)
    compact.save(with_noise(drafter), tmp_path / "1", target)
    for earlier, passes in (("0", 1), ("1", 1), ("1", 2)):
        config = some_config(data, tmp_path, init=str(tmp_path / earlier), refinement=passes)
        new = make_run(target, config).drafter
        assert new.config.refinement == passes
        assert torch.equal(new.fc.weight, plain.fc.weight)
        assert all(bool(x.weight.any()) == (earlier == "1") for x in new.refinement.outputs)
    with pytest.raises(UserError, match="its refinement is 1, this run's is 0"):
        make_run(target, some_config(data, tmp_path, init=str(tmp_path / "1")))


@pytest.mark.parametrize("extension", [pytest.param("refinement", marks=pytest.mark.slow), "all"])
def test_the_engine_refines(extension: str) -> None:
    """The engine drafts and accepts what the plain loop does, but not without the refinement."""
    one = trained("p-eagle", 48, extension)
    drafter = with_noise(one.drafter, 0.1)
    requests = [(ids, {"max_tokens": 20, "ignore_eos": True}) for ids in prompts(8)]
    served = []
    for refined in (True, False):
        engine = engine_of(pair_of(one.target, {"p-eagle": drafter}), "p-eagle")
        if not refined:
            engine.loop.stepper.drafter.refinement = None
        served.append(
            [[(s.tokens, s.accepted) for s in steps] for steps in serve(engine, requests)]
        )
    one.target.tap(AUX)
    expected = [
        list(decode(one.target, proposer_for(drafter), ids, K, 20, Sampling()))
        for ids, _ in requests
    ]
    assert served[0] == [[(s.tokens, s.accepted) for s in steps] for steps in expected]
    assert served[0] != served[1]
    assert sum(accepted for steps in served[0] for _, accepted in steps) > 20


@pytest.mark.parametrize("extension", ["refinement", "all"])
@pytest.mark.parametrize("options", [{"k": 1}, {"k": "auto"}, {"tree": 9}, {"int8": True}], ids=str)
def test_answers_equal_those_without_drafts(options: dict, extension: str) -> None:
    one = trained("p-eagle", 48, extension)
    pair = pair_of(one.target, {"p-eagle": with_noise(one.drafter, 0.1)})
    requests = [(ids, {"max_tokens": 20, "ignore_eos": True}) for ids in prompts(6)]
    drafted = engine_of(pair, "p-eagle", **options)
    plain = engine_of(pair, "none", int8=options.get("int8", False))
    answers, expected = (serve(engine, requests) for engine in (drafted, plain))
    assert [tokens_of(steps) for steps in answers] == [tokens_of(steps) for steps in expected]
    assert drafted.metrics.acceptance_length > 1.05
