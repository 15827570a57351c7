"""`peagle bench-step`: random weights, drafts accepted according to the acceptance profile."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from peagle.bench import step_cost
from peagle.bench.random_models import parse_experts, random_pair, shape_config
from peagle.bench.step_cost import (
    PROFILE,
    StepCell,
    build_engine,
    conditional_probabilities,
)
from peagle.cli import app
from peagle.cli.application import out
from peagle.engine import Engine
from peagle.engine.step.step_measurements import ExpertLoad
from peagle.errors import UserError
from peagle.loaded import LoadedPair
from tests.support.kernels.cpu_features import needs_c

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
    "32",
]


def test_every_method_and_load(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
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
        *("--output", "64"),  # enough steps for a mean
    ]
    result = CliRunner().invoke(app, [*arguments, "--out", str(file)])
    assert result.exit_code == 0, result.output
    cells = json.loads(file.read_text())["cells"]
    assert {(cell["method"], cell["concurrency"]) for cell in cells} == {
        (method, c) for method in ("none", "eagle3", "p-eagle") for c in (1, 8)
    }
    lengths = {
        cell["method"]: cell["acceptance_length"] for cell in cells if cell["concurrency"] == 8
    }
    assert lengths["none"] == 1 and lengths["eagle3"] == pytest.approx(1 + sum(PROFILE), rel=0.2)
    assert lengths["p-eagle"] == pytest.approx(1 + sum(PROFILE), rel=0.2)


def test_drafts_beyond_the_profile_are_never_accepted() -> None:
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


@needs_c
def test_the_fast_path_is_measured() -> None:
    """`bench-step` turns exact mode off, which is the default for batches in bfloat16."""
    pair = random_pair("tiny", "cpu", torch.bfloat16)
    engine = build_engine(pair, "p-eagle", "auto", 2, 64)
    assert engine.exact_mode is None
    engine.close()


def test_any_shape_of_transformers(tmp_path: Path) -> None:
    """A config file, or the folder that holds it; -k takes a list."""
    config = random_pair("tiny", "cpu", torch.float32).target.model.config
    config.save_pretrained(tmp_path / "my-shape")
    for shape in (tmp_path / "my-shape", tmp_path / "my-shape" / "config.json"):
        file = tmp_path / "steps.json"
        arguments = ["bench-step", str(shape), *ARGUMENTS[2:], "--methods", "none,p-eagle"]
        arguments += ["-k", "auto,2", "--concurrency", "2", "--repeats", "1", "--out", str(file)]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        cells = json.loads(file.read_text())["cells"]
        assert [(cell["method"], cell["k"]) for cell in cells] == [
            ("none", "auto"),
            ("p-eagle", "auto"),
            ("p-eagle", "2"),
        ]


@pytest.mark.parametrize("shape", ["tiny-qwen3-moe", "tiny-gpt-oss"])
def test_mixtures_with_a_profile_for_each_method(shape: str) -> None:
    arguments = ["bench-step", shape, *ARGUMENTS[2:], "--methods", "p-eagle,eagle3", "-k", "2"]
    arguments += ["--profile", "p-eagle=1,1", "--profile", "eagle3=0,0", "--concurrency", "2"]
    result = CliRunner().invoke(app, [*arguments, "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    parallel, sequential = json.loads(result.output[result.output.index("[{") :])
    assert parallel["acceptance_length"] == pytest.approx(3, rel=0.1)
    assert sequential["acceptance_length"] == 1


def test_touched_experts_are_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "expert_load", lambda *_: ExpertLoad(21.3, 32, 1 << 30))
    monkeypatch.setattr(out, "_width", 200)
    arguments = [*ARGUMENTS, "--methods", "none", "--concurrency", "1", "--repeats", "1"]
    result = CliRunner().invoke(app, arguments)
    assert "experts" in result.output and "21.3 / 32" in result.output
    result = CliRunner().invoke(app, [*arguments, "--bandwidth", "1", "--json"])
    [cell] = json.loads(result.output[result.output.index("[{") :])
    assert (cell["experts_touched"], cell["experts"]) == (21.3, 32)
    head_bytes = 4 * 512 * 64
    assert cell["floor_ms"] == pytest.approx(1000 * ((1 << 30) + head_bytes) / 1e12, abs=1e-4)


@pytest.mark.parametrize(
    ("method", "most"),
    # Of 8 experts, a row chooses 2; both requests have one row, or four with three drafts.
    [("none", 4), ("p-eagle", 8)],
)
def test_the_experts_of_a_mixture_are_counted(method: str, most: int) -> None:
    arguments = ["bench-step", "tiny-qwen3-moe", *ARGUMENTS[2:], "--methods", method, "-k", "3"]
    result = CliRunner().invoke(app, [*arguments, "--concurrency", "2", "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    [cell] = json.loads(result.output[result.output.index("[{") :])
    assert cell["experts"] == 8 and 2 <= cell["experts_touched"] <= most
    assert "counts all experts" not in result.output


def test_the_floor_without_expert_counts_is_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in layers that run through transformers."""
    monkeypatch.setattr(Engine, "expert_load", lambda *_: None)
    monkeypatch.setattr(out, "_width", 200)
    arguments = ["bench-step", "tiny-qwen3-moe", *ARGUMENTS[2:], "--methods", "none"]
    arguments += ["--concurrency", "1", "--repeats", "1"]
    result = CliRunner().invoke(app, arguments)
    assert "- / 8" in result.output
    assert "the floor counts all experts" in " ".join(result.output.split())
    result = CliRunner().invoke(app, [*arguments, "--json"])
    [cell] = json.loads(result.output[result.output.index("[{") :])
    assert (cell["experts_touched"], cell["experts"]) == (None, 8)
    result = CliRunner().invoke(app, [*ARGUMENTS, *arguments[-6:]])
    assert result.exit_code == 0 and "counts all experts" not in " ".join(result.output.split())


def test_the_step_time_is_that_of_the_fastest_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first run is the warm-up.
    runs = iter([(9.0, 1.0), (50.0, 4.0), (80.0, 2.0), (65.0, 3.0)])
    real = step_cost.run_prompts

    def timed(*args: Any) -> tuple[float, float]:
        real(*args)
        return next(runs)

    monkeypatch.setattr(step_cost, "run_prompts", timed)
    pair = random_pair("tiny", "cpu", torch.float32)
    cell = step_cost.measure_random(pair, "none", 1, 1, output=4, repeats=3)
    assert (cell.tokens_per_second, cell.step_ms, cell.mean_tokens_per_second) == (80, 2, 65)


def test_a_config_file_is_a_shape(tmp_path: Path) -> None:
    shape_config("tiny-gpt-oss").save_pretrained(tmp_path)
    arguments = [*ARGUMENTS[2:], "--methods", "none", "--concurrency", "1", "--repeats", "1"]
    config = ["--config", str(tmp_path / "config.json")]
    result = CliRunner().invoke(app, ["bench-step", *config, *arguments, "--json"])
    assert result.exit_code == 0, result.output
    for wrong in ([], ["tiny", *config]):
        result = CliRunner().invoke(app, ["bench-step", *wrong, *arguments])
        assert result.exit_code == 2 and "--config" in result.output


def test_the_format_of_experts() -> None:
    assert parse_experts(None, "gpt-oss-120b") == "mxfp4"
    assert parse_experts(None, "gpt-oss-20b") == parse_experts("bf16", "gpt-oss-120b") == "bf16"
    with pytest.raises(UserError, match="bf16 or mxfp4"):
        parse_experts("int3", "gpt-oss-20b")
    with pytest.raises(UserError, match="bf16"):
        random_pair("tiny", "cpu", torch.float32, experts="mxfp4")


@pytest.mark.parametrize("content", [None, "{}", "nonsense"])
def test_an_unknown_shape_is_an_error(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    result = CliRunner().invoke(app, ["bench-step", str(file), *ARGUMENTS[2:]])
    assert result.exit_code == 2 and "config.json" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--repeats", "0"], "--repeats is 0: use 1 or more"),
        (["--prompt", "0"], "--prompt is 0"),
        (["--output", "-4"], "--output is -4"),
        (["--limit", "0"], "--limit is 0"),
        (["--bandwidth", "0"], "--bandwidth is 0 TB/s: use a number above 0"),
        (["--bandwidth", "nan"], "--bandwidth is nan"),
        (["--bandwidth", "inf"], "--bandwidth is inf"),
        (["--profile", "2"], "the shares of --profile 2 must be 0 to 1"),
        (["--profile", ".5,.8"], "must not rise"),
        (["--profile", "eagle3=.5,-.1"], "--profile .5,-.1"),
        (["--profile", "nan"], "--profile nan"),
    ],
)
def test_invalid_numbers_are_refused(options: list[str], message: str) -> None:
    """Invalid values are refused before a model is built."""
    result = CliRunner().invoke(app, [*ARGUMENTS, *options])
    assert result.exit_code == 2 and message in result.output and result.output.count("\n") == 1


def test_a_profile_may_repeat_a_value() -> None:
    arguments = [*ARGUMENTS, "--methods", "p-eagle", "-k", "3", "--concurrency", "4"]
    result = CliRunner().invoke(app, [*arguments, "--profile", "1,1,1", "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    [cell] = json.loads(result.output[result.output.index("[{") :])
    assert cell["acceptance_length"] == pytest.approx(4, rel=0.05)


def test_trees_accept_more_than_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only P-EAGLE supports trees; the table shows their size."""
    monkeypatch.setattr(out, "_width", 200)
    arguments = [*ARGUMENTS, "--methods", "none,p-eagle", "-k", "7", "--concurrency", "8"]
    arguments += ["--tree", "0,31", "--repeats", "1", "--output", "64"]
    short = ["--methods", "p-eagle", "-k", "7", "--tree", "15", "--concurrency", "2"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    cells = json.loads(result.output[result.output.index("[{") :])
    assert [(cell["method"], cell["tree"]) for cell in cells] == [
        ("none", 0),
        ("p-eagle", 0),
        ("p-eagle", 31),
    ]
    _, chain, tree = (cell["acceptance_length"] for cell in cells)
    assert chain == pytest.approx(1 + sum(PROFILE), rel=0.2) and tree > chain + 0.4
    result = CliRunner().invoke(app, [*ARGUMENTS, *short])
    assert result.exit_code == 0 and "trees of 15, 2 at a time" in result.output
    [header] = [line for line in result.output.splitlines() if "tokens/s" in line]
    assert header.replace("┃", " ").split()[:4] == ["method", "K", "tree", "c"]


def test_adaptive_drafting_with_trees_is_measured() -> None:
    """Adaptive drafting chooses among chains and trees with different acceptance lengths."""
    arguments = [*ARGUMENTS, "--methods", "p-eagle", "-k", "auto", "--concurrency", "2"]
    result = CliRunner().invoke(app, [*arguments, "--tree", "15", "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    [cell] = json.loads(result.output[result.output.index("[{") :])
    assert cell["tree"] == 15 and set(cell["k_steps"]) <= {*map(str, (0, 1, 2, 3, 5, 7, 15))}
    assert cell["acceptance_length"] > 1


@pytest.mark.parametrize(
    "options, message",
    [
        (["--tree", "many"], "--tree 32"),
        (["--tree", "-3"], "--tree 32"),
        (["--tree", "99"], "at most 62 nodes"),
        (["--tree", "15", "-k", "20"], "more nodes than K"),
        (["--tree", "15", "--methods", "none,eagle3"], "--methods"),
    ],
)
def test_invalid_trees_are_refused(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, [*ARGUMENTS, *options])
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_an_interrupted_run_keeps_its_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = step_cost.measure_random

    def interrupted(pair: LoadedPair, method: str, *args: Any) -> StepCell:
        if method == "p-eagle":
            raise KeyboardInterrupt
        return real(pair, "none", *args)

    monkeypatch.setattr(step_cost, "measure_random", interrupted)
    file = tmp_path / "steps.json"
    arguments = [*ARGUMENTS, "--methods", "none,p-eagle", "--concurrency", "1", "--repeats", "1"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(file)])
    assert result.exit_code != 0
    assert [cell["method"] for cell in json.loads(file.read_text())["cells"]] == ["none"]
