"""Drafters of tiny mixtures of experts, from prompts or captured features to an evaluation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.drafter.formats import checkpoint
from peagle.target import Target, load_target
from peagle.target.experts.stored_experts import StoredExperts
from tests.support.command_line import run
from tests.support.models.chat_targets import make_tokenizer
from tests.support.models.mixtures import AUX, MIXTURES, make_mixture
from tests.support.models.mxfp4_folders import save_mxfp4
from tests.support.train.training import write_answers

pytestmark = pytest.mark.usefixtures("no_curves")
STOP = 1  # id of the token that ends an answer
SMALL = "layers=1 k=4 eval_k=3 aux_layer_ids=0,1,2 mask_token_id=5 pack_tokens=256 held_out=4"
FLOAT32 = ("--dtype", "float32", "--device", "cpu")


def save_target(folder: Path, kind: str) -> Path:
    if kind == "mxfp4":
        save_mxfp4(folder, **MIXTURES["gpt-oss"])
    else:
        model: Any = make_mixture(kind).model
        model.lm_head.weight.data[STOP] *= 4  # Most answers end.
        model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def settings(*more: str) -> list[str]:
    return [part for word in (*SMALL.split(), *more) for part in ("--set", word)]


def evaluate(folder: Path, target: Path, drafter: Path) -> Any:
    lines = [json.dumps({"id": i, "turns": [f"w{7 + i} w{40 + i}"]}) for i in range(3)]
    (folder / "gsm8k.jsonl").write_text("\n".join(lines))
    words = ("--data", folder, "--set", "gsm8k", "-k", 3, "--max-tokens", 12, "--json")
    return json.loads(run("evaluate", target, "--drafter", drafter, *words, *FLOAT32))


@pytest.mark.parametrize("kind", ["qwen3-moe", "gpt-oss"])
def test_make_drafter(kind: str, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", kind)
    prompts = [json.dumps({"turns": [f"w{3 + i % 60} w{40 + i % 50}"]}) for i in range(16)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    where = ("--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "out", "--epochs", 1)
    text = run("make-drafter", target, *where, *settings("max_anchors=64"), "--device", "cpu")
    assert "acceptance length" in text
    published = tmp_path / "out" / "p-eagle" / "published"
    assert "| steps |" in (published / "README.md").read_text()
    [result] = evaluate(tmp_path, target, published)["results"]
    assert result["tasks"] == 3 and result["drafts"] > 0 and result["acceptance_length"] >= 1


def capture_features(folder: Path, target: Target, where: Path) -> Path:
    data = write_answers(target, folder / "answers.jsonl", count=16, tokens=12)
    out = folder / "captured"
    layers = ",".join(str(layer) for layer in AUX)
    options = ("--data", data, "--out", out, "--aux-layers", layers, "--top-k", 8, "--json")
    reported = json.loads(run("capture", "--target", where, *options, *FLOAT32))
    assert reported["documents"] == 16
    return out


@pytest.mark.parametrize("kind", ["qwen3-moe", "mxfp4"])
def test_capture_train_and_evaluate(kind: str, tmp_path: Path) -> None:
    where = save_target(tmp_path / "target", kind)
    target = load_target(where, torch.float32, "cpu")
    layer: Any = target.layers[0]
    assert isinstance(layer.mlp.experts, StoredExperts) == (kind == "mxfp4")
    captured = capture_features(tmp_path, target, where)
    out = tmp_path / "out"
    options = ("log_every=1", "steps=12", "lr=0.01", f"data={captured}", f"out={out}")
    run("train", *settings(f"target={where}", *options))
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    values = [record["loss"] for record in records if "loss" in record]
    assert sum(values[-4:]) < 0.98 * sum(values[:4])
    assert checkpoint.load(out / "drafter", target, torch.float32).config.trained
    report = evaluate(tmp_path, where, out / "drafter")
    assert report["trained"] and report["results"][0]["drafts"] > 0
