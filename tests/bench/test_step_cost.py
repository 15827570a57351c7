"""`peagle bench-step`: random weights, drafts accepted as the profile says, chains only."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from peagle.bench import step_cost
from peagle.bench.random_models import random_pair
from peagle.bench.step_cost import (
    PROFILE,
    StepCell,
    build_engine,
    conditional_probabilities,
)
from peagle.cli import app
from peagle.loaded import LoadedPair

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


def test_any_shape_of_transformers(tmp_path: Path) -> None:
    """A config file, or the folder that holds it; -k takes a list."""
    config = random_pair("tiny", "cpu", torch.float32).target.model.config
    config.save_pretrained(tmp_path / "my-shape")
    for shape in (tmp_path / "my-shape", tmp_path / "my-shape" / "config.json"):
        out = tmp_path / "steps.json"
        arguments = ["bench-step", str(shape), *ARGUMENTS[2:], "--methods", "none,p-eagle"]
        arguments += ["-k", "auto,2", "--concurrency", "2", "--repeats", "1", "--out", str(out)]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        cells = json.loads(out.read_text())["cells"]
        assert [(cell["method"], cell["k"]) for cell in cells] == [
            ("none", "auto"),
            ("p-eagle", "auto"),
            ("p-eagle", "2"),
        ]


@pytest.mark.parametrize("content", [None, "{}", "nonsense"])
def test_a_shape_that_is_none(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    result = CliRunner().invoke(app, ["bench-step", str(file), *ARGUMENTS[2:]])
    assert result.exit_code == 2 and "config.json" in result.output


def test_a_profile_may_repeat_a_value() -> None:
    arguments = [*ARGUMENTS, "--methods", "p-eagle", "-k", "3", "--concurrency", "4"]
    result = CliRunner().invoke(app, [*arguments, "--profile", "1,1,1", "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    [cell] = json.loads(result.output[result.output.index("[{") :])
    assert cell["acceptance_length"] == pytest.approx(4, rel=0.05)


def test_an_interrupted_run_keeps_its_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = step_cost.measure_random

    def interrupted(pair: LoadedPair, method: str, *args: Any) -> StepCell:
        if method == "p-eagle":
            raise KeyboardInterrupt
        return real(pair, "none", *args)

    monkeypatch.setattr(step_cost, "measure_random", interrupted)
    out = tmp_path / "steps.json"
    arguments = [*ARGUMENTS, "--methods", "none,p-eagle", "--concurrency", "1", "--repeats", "1"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert result.exit_code != 0
    assert [cell["method"] for cell in json.loads(out.read_text())["cells"]] == ["none"]
