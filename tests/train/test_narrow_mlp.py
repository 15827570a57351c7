"""A drafter whose MLP is narrower than the target's: initialized, trained, stored, served."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peagle.drafter.formats import checkpoint
from peagle.errors import UserError
from peagle.target import Target
from peagle.train.drafter_init import init_from_target
from tests.support.engine.engines import engine_of, pair_of, serve
from tests.support.models.tiny_models import make_drafter
from tests.support.train.training import make_run, prompts, some_answers, some_config, train

WIDTH = 24


def test_it_is_initialized_with_the_largest_channels(target: Target) -> None:
    drafter = make_drafter(target, "p-eagle", 1, intermediate_size=WIDTH)
    mlp, source = drafter.layers[0].mlp, target.layers[-1].mlp
    wide = source.gate_proj.weight.shape[0]
    assert wide > WIDTH == drafter.config.intermediate_size
    init_from_target(drafter, target)
    sizes = [(w.norm(dim=1), w) for w in (source.gate_proj.weight, source.up_proj.weight)]
    size = sizes[0][0] * sizes[1][0] * source.down_proj.weight.norm(dim=0)
    channels = size.argsort(descending=True)[:WIDTH].sort().values
    assert torch.equal(mlp.gate_proj.weight, source.gate_proj.weight[channels])
    assert torch.equal(mlp.up_proj.weight, source.up_proj.weight[channels])
    assert torch.equal(mlp.down_proj.weight, source.down_proj.weight[:, channels])


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_trained_and_served(method: str, tmp_path: Path) -> None:
    target, folder = some_answers()
    settings = {"method": method, "intermediate_size": WIDTH, "init": "target", "save_every": 0}
    config = some_config(folder / "answers.jsonl", tmp_path / "run", **settings)
    trainer = make_run(target, config)
    train(trainer)
    drafter = checkpoint.load(trainer.out / "drafter", target, torch.float32)
    assert drafter.config.intermediate_size == WIDTH
    engine = engine_of(pair_of(target, {method: drafter}), method)
    requests = [(ids, {"max_tokens": 12, "ignore_eos": True}) for ids in prompts(3)]
    steps = serve(engine, requests)
    assert all(sum(len(step.tokens) for step in own) == 12 for own in steps)
    wide = replace(config, init=str(trainer.out / "drafter"), intermediate_size=0)
    with pytest.raises(UserError, match=f"its intermediate_size is {WIDTH}, this run's is"):
        make_run(target, wide)
