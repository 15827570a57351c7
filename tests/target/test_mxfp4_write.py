"""`peagle quantize --format mxfp4`: the written folder is readable by transformers; errors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from typer.testing import CliRunner, Result

from peagle.cli import app
from peagle.errors import UserError
from peagle.target import load_target
from peagle.target.experts.mxfp4_write import write_mxfp4
from tests.support.models.mxfp4_folders import INDEX, save_mxfp4
from tests.support.models.tiny_models import make_target

IDS = torch.arange(3, 43)
GATE_UP = "model.layers.2.mlp.experts.gate_up_proj"


def save_dense(folder: Path, name: str = "gpt-oss", **options: str) -> Path:
    sizes = {"intermediate_size": 64} if name == "gpt-oss" else {}
    make_target(name, **sizes).model.to(torch.bfloat16).save_pretrained(folder, **options)
    return folder


@pytest.mark.parametrize("max_size", ["1GB", "100KB"])
def test_the_folder_is_read_by_transformers(max_size: str, tmp_path: Path) -> None:
    source = save_dense(tmp_path / "source", max_shard_size=max_size)
    out = tmp_path / "out"
    report = write_mxfp4(source, out)
    files = sorted(x.name for x in out.glob("*.safetensors"))
    assert files == sorted(x.name for x in source.glob("*.safetensors"))
    assert (len(files) > 1) == (out / INDEX).is_file() == (max_size == "100KB")
    assert len(report.errors) == 8 * 2 * 4 and 0.05 < report.error < 0.13
    assert report.bytes_after == sum(x.nbytes for f in files for x in load_file(out / f).values())
    model = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    ).float()
    dense = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    read, written = model.get_parameter(GATE_UP), dense.get_parameter(GATE_UP)
    assert (read - written).norm() < 0.13 * written.norm()
    target = load_target(out, torch.float32, "cpu")
    with torch.no_grad():
        expected = model(IDS[None]).logits[0]
    assert (target.forward(IDS).logits - expected).abs().max() <= 1e-5


def test_only_experts_change(tmp_path: Path) -> None:
    source = save_dense(tmp_path / "source")
    write_mxfp4(source, tmp_path / "out")
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("source", "out"))
    rounded = before.keys() - after.keys()
    assert len(rounded) == 8 * 2 and all(".mlp.experts." in name for name in rounded)
    assert all(torch.equal(before[name], after[name]) for name in before.keys() - rounded)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert quantization["quant_method"] == "mxfp4"
    assert "model.layers.*.self_attn" in quantization["modules_to_not_convert"]
    assert "| matrices | 64 |" in (tmp_path / "out" / "README.md").read_text()


def test_dequantized_mxfp4_is_recovered_exactly(tmp_path: Path) -> None:
    """A published target that was dequantized to bfloat16 is quantized without loss."""
    model = save_mxfp4(tmp_path / "published")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "source")
    report = write_mxfp4(tmp_path / "source", tmp_path / "out")
    assert report.error == 0
    logits = [
        load_target(tmp_path / x, torch.float32, "cpu").forward(IDS).logits
        for x in ("published", "out")
    ]
    assert torch.equal(*logits)


def test_the_command(tmp_path: Path) -> None:
    source = save_dense(tmp_path / "source")
    out = tmp_path / "out"

    def run(*args: str) -> Result:
        command = ["quantize", str(source), "--out", str(out), "--format", "mxfp4", *args]
        return CliRunner().invoke(app, command)

    report = json.loads(run("--json").stdout)
    assert (report["format"], report["group"], report["matrices"]) == ("mxfp4", 32, 64)
    assert report["bytes_after"] < report["bytes_before"]
    again = run()  # It may overwrite its own output.
    assert again.exit_code == 0 and load_target(out, torch.float32, "cpu").format == "mxfp4 experts"
    wrong = run("--group", "32")
    assert wrong.exit_code == 2 and "--group is for int4" in wrong.stderr


def test_targets_that_cannot_be_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in ("qwen3-moe", "llama"):
        source = save_dense(tmp_path / name, name)
        with pytest.raises(UserError, match=r"of GPT-OSS, and this is a .*: use fp8 or int8"):
            write_mxfp4(source, out)
    make_target("gpt-oss").model.save_pretrained(tmp_path / "narrow")
    with pytest.raises(UserError, match=r"multiples of 32.*48 wide: use fp8 or int8"):
        write_mxfp4(tmp_path / "narrow", out)
    save_mxfp4(tmp_path / "published")
    with pytest.raises(UserError, match="quantized already"):
        write_mxfp4(tmp_path / "published", out)
    assert not out.exists()


def test_broken_sources_are_refused(tmp_path: Path) -> None:
    source = save_dense(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    matrix = tensors[GATE_UP]
    changes = {
        "is not finite": matrix.index_fill(0, torch.tensor([1]), torch.inf),
        "but the config needs": matrix.mT.contiguous(),
        "lacks": None,
    }
    for message, change in changes.items():
        del tensors[GATE_UP]
        save_file(
            tensors | ({} if change is None else {GATE_UP: change}), source / "model.safetensors"
        )
        with pytest.raises(UserError, match=message) as error:
            write_mxfp4(source, tmp_path / "out")
        assert GATE_UP in str(error.value) and not (tmp_path / "out").exists()
        tensors[GATE_UP] = matrix
