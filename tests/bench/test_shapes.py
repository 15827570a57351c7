"""The shapes of `peagle bench-step`: sizes, names, and config files that cannot run."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, logging
from typer.testing import CliRunner

from peagle.bench import random_models
from peagle.bench.random_models import parse_experts, random_pair
from peagle.bench.shapes import SHAPES, expert_count, shape_config, shape_name
from peagle.cli import app
from peagle.errors import UserError
from peagle.target import default_aux_layer_ids

PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
EXPERTS = {"qwen3-30b-a3b": 128, "gpt-oss-20b": 32, "gpt-oss-120b": 128}
QUICK = ["--device", "cpu", "--dtype", "float32", "--methods", "none", "--concurrency", "1"]
QUICK += ["--repeats", "1", "--prompt", "8", "--output", "8"]


def tiny(shape: str = "tiny", **changes: Any) -> dict[str, Any]:
    return shape_config(shape).to_dict() | changes


def write_config(folder: Path, content: Any) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(content))
    return file


def run(file: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench-step", "--config", str(file), *QUICK, *options])
    return result.exit_code, result.output


@pytest.mark.parametrize("shape", PARAMETERS)
def test_a_shape_has_the_parameters_of_its_checkpoint(shape: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(shape), dtype=torch.bfloat16)
    assert model.num_parameters() == PARAMETERS[shape]
    assert expert_count(model.config) == EXPERTS.get(shape)


def test_help_lists_every_shape() -> None:
    result = CliRunner().invoke(app, ["bench-step", "--help"], env={"COLUMNS": "300"})
    words = result.output.replace(",", " ").split()
    assert set(SHAPES) <= set(words)


# Configs of users.


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "no JSON object"),
        (None, "no JSON object"),
        (3, "no JSON object"),
        (tiny(num_hidden_layers="4"), "'num_hidden_layers' expected int, got str"),
        (tiny(num_hidden_layers=0), "set num_hidden_layers to 1 or more"),
        (tiny(num_key_value_heads=3), "Correct its config"),
        (tiny(rope_parameters={"rope_type": "unknown"}), "KeyError 'unknown'"),
        (tiny("tiny-qwen3-moe", num_experts_per_tok=9), "set num_experts_per_tok to 1 to 8"),
        (tiny("tiny-gpt-oss", num_experts_per_tok=0), "set num_experts_per_tok to 1 to 8"),
        ({"model_type": "t5", "d_model": 16, "num_layers": 2}, "causal language model"),
        (
            {"model_type": "mamba", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2},
            "layers are all attention layers",
        ),
    ],
    ids=[
        *("a list", "null", "a number", "a wrong type", "no layers", "heads", "rope"),
        *("too many experts", "no expert", "an encoder with a decoder", "no attention"),
    ],
)
def test_a_config_that_cannot_run_gives_one_line(
    content: Any, message: str, tmp_path: Path
) -> None:
    logging.set_verbosity_warning()
    code, output = run(write_config(tmp_path / "mine", content))
    assert code == 2 and output.count("\n") == 1
    # Otherwise transformers prints additional warnings.
    assert "no JSON" in output or logging.get_verbosity() == logging.ERROR
    assert "mine" in output and message in output


def test_a_list_of_expert_counts_is_not_a_number() -> None:
    assert expert_count(SimpleNamespace(num_experts=[8, 16])) is None
    assert expert_count(SimpleNamespace(num_experts=0)) is None
    assert expert_count(SimpleNamespace(n_routed_experts=64)) == 64


def test_insufficient_gpu_memory_gives_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 100 GiB")

    monkeypatch.setattr(random_models, "random_model", fail)
    with pytest.raises(UserError, match="tiny does not fit the memory of the GPU"):
        random_pair("tiny", "cpu", torch.float32)


def test_a_config_is_named_after_its_folder_or_file(tmp_path: Path) -> None:
    file = write_config(tmp_path / "my-shape", tiny())
    other = file.with_name("other.json")
    other.write_bytes(file.read_bytes())
    names = [shape_name(str(path)) for path in (file, file.parent, other)]
    assert names == ["my-shape", "my-shape", "other"]
    code, output = run(file, "--json")
    assert code == 0 and json.loads(output[output.index("[{") :])[0]["shape"] == "my-shape"
    assert random_pair(str(other), "cpu", torch.float32).pair.name == "other"


@pytest.mark.parametrize("layers", range(1, 9))
def test_small_shapes_have_drafters(layers: int, tmp_path: Path) -> None:
    """The taps are distinct target layers; with 7 or more layers they are those of vLLM."""
    shape = str(write_config(tmp_path, tiny(num_hidden_layers=layers)))
    pair = random_pair(shape, "cpu", torch.float32, methods=("eagle3",))
    ids = pair.drafter("eagle3").config.aux_layer_ids
    assert ids is not None and pair.drafter("eagle3").config.misfits(pair.target) == []
    assert len(ids) == min(layers, 3)
    assert layers < 7 or ids == default_aux_layer_ids(layers)


def test_drafters_that_are_not_measured_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.bench.random_models.random_drafter", None)
    assert CliRunner().invoke(app, ["bench-step", "tiny", *QUICK]).exit_code == 0


# Formats.


def test_the_config_decides_how_experts_are_stored(tmp_path: Path) -> None:
    """As in the published config of GPT-OSS; `--experts` overrides it."""
    stored = tiny("tiny-gpt-oss", quantization_config={"quant_method": "mxfp4"})
    file = write_config(tmp_path / "stored", stored)
    assert parse_experts(None, str(file)) == "mxfp4" and parse_experts("bf16", str(file)) == "bf16"
    floors = []
    for options in ([], ["--experts", "bf16"]):
        code, output = run(file, "--json", "--bandwidth", "1e-6", *options)
        assert code == 0 and "do not follow" not in output
        floors.append(json.loads(output[output.index("[{") :])[0]["floor_ms"])
    assert floors[0] < floors[1]
    other = tiny("tiny-qwen3-moe", quantization_config={"quant_method": "mxfp4"})
    code, output = run(write_config(tmp_path / "other", other))
    assert code == 2 and "cannot be mxfp4" in output


def test_unsupported_formats_are_reported(tmp_path: Path) -> None:
    file = write_config(tmp_path, tiny(quantization_config={"quant_method": "fp8"}))
    assert parse_experts(None, str(file)) == "bf16"
    code, output = run(file)
    line = " ".join(output.split())
    assert code == 0 and "random weights do not follow the format of" in line and "fp8" in line
