"""`peagle bench-step`: random weights, drafts accepted as the profile says, chains only."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from peagle.bench.random_models import random_pair
from peagle.bench.step_cost import (
    PROFILE,
    build_engine,
    conditional_probabilities,
)
from peagle.cli import app

ARGUMENTS = [
    "bench-step",
    "tiny",
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--prompt",
    "8",
    "--output",
    "64",
]


def test_every_method_and_load(tmp_path: Path) -> None:
    out = tmp_path / "steps.json"
    arguments = [
        *ARGUMENTS,
        "--methods",
        "none,eagle3,p-eagle",
        "-k",
        "11",
        "--concurrency",
        "1,8",
        "--repeats",
        "1",
    ]
    result = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert result.exit_code == 0, result.output
    cells = json.loads(out.read_text())["cells"]
    assert {(cell["method"], cell["concurrency"]) for cell in cells} == {
        (method, c) for method in ("none", "eagle3", "p-eagle") for c in (1, 8)
    }
    lengths = {
        cell["method"]: cell["acceptance_length"] for cell in cells if cell["concurrency"] == 8
    }
    assert lengths["none"] == 1 and lengths["eagle3"] == pytest.approx(1 + sum(PROFILE), rel=0.2)
    assert lengths["p-eagle"] == pytest.approx(1 + sum(PROFILE), rel=0.2)


def test_drafts_behind_the_profile_are_never_right() -> None:
    pair = random_pair("tiny", "cpu", torch.float32)
    engine = build_engine(pair, "p-eagle", "auto", 2, 64, tree=0)
    engine.force_acceptance(conditional_probabilities(PROFILE[:3]))
    assert engine.max_shape.is_chain
    for _ in range(4):
        engine.add([1, 2, 3], max_tokens=48, ignore_eos=True)
    engine.drain()
    assert engine.metrics.generated_tokens == 4 * 48
    assert max(accepted for _, accepted in engine.metrics.pass_counts) <= 3
    engine.close()
