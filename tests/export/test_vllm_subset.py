"""Parts that vLLM does not support are left out and reported, or the drafter is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from peagle.cli import app
from peagle.deploy.drafter import subset_notices
from peagle.drafter import Drafter
from peagle.drafter.config import config_for
from peagle.drafter.formats import checkpoint, compact
from peagle.drafter.formats.speculators import VerifierConfig
from peagle.drafter.untrained import untrained_drafter
from peagle.errors import UserError
from peagle.export.check import check
from peagle.export.export import export, same_drafts
from peagle.export.vllm_subset import left_out_parts, subset_notice, vllm_subset
from peagle.loaded import load
from peagle.target import Target
from tests.support.bench.benching import tiny_folder, write_set
from tests.support.models.tiny_models import MASK, add_noise, make_drafter

VERIFIER = VerifierConfig("tiny", ["LlamaForCausalLM"])
MORE = {"dependency": 8, "confidence": True, "calibration": (0.9, 0.8, 0.7)}


def random_drafter(target: Target, draft_vocab: int | None = None, **switches: object) -> Drafter:
    """A drafter with random changes to all tensors, so that each part has an effect."""
    drafter = make_drafter(target, "p-eagle", 2, draft_vocab, **switches)
    add_noise(drafter, 0.3)
    return drafter


@pytest.mark.parametrize("draft_vocab", [None, 40])
def test_the_subset_keeps_the_other_tensors(target: Target, draft_vocab: int | None):
    drafter = random_drafter(target, draft_vocab, **MORE)
    plain = vllm_subset(drafter)
    assert plain.config == replace(drafter.config, dependency=0, confidence=False, calibration=())
    assert drafter.config.dependency == 8 and any(
        "dependency" in name for name in drafter.state_dict()
    )
    names = {
        name for name in drafter.state_dict() if not name.startswith(("dependency.", "confidence."))
    }
    assert set(plain.state_dict()) == names
    assert all(torch.equal(plain.state_dict()[name], drafter.state_dict()[name]) for name in names)
    same, total = same_drafts(drafter, plain, 5)
    assert same < total, "the dependency changes some drafts"


def test_a_plain_drafter_is_unchanged(target: Target):
    drafter = make_drafter(target, "p-eagle", 2, fc_norm=True)
    assert (
        vllm_subset(drafter) is drafter
        and left_out_parts(drafter.config) == []
        and subset_notice(drafter.config) is None
    )


@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_an_export_omits_unsupported_parts(target: Target, tmp_path: Path, to: str):
    drafter = random_drafter(target, 40, **MORE)
    export(drafter, tmp_path / "d", to, 5, VERIFIER)  # type: ignore[arg-type]
    read = checkpoint.read(tmp_path / "d")
    assert read.problems() == [] and left_out_parts(read.config) == []
    assert not [name for name in read.stored if "dependency" in name or "confidence" in name]
    same, total = same_drafts(vllm_subset(drafter), checkpoint.load(tmp_path / "d", None), 5)
    assert same == total == 40


@pytest.mark.parametrize(
    ("switch", "words"),
    [
        ("inject", "taps in every layer"),
        ("bidirectional", "bidirectional"),
        ("convolution", "the convolution"),
        ("refinement", "the refinement passes"),
    ],
)
def test_parts_that_change_every_row_are_refused(
    target: Target, tmp_path: Path, switch: str, words: str
):
    on, off = (1, "0") if switch == "refinement" else (True, "false")
    drafter = make_drafter(target, "p-eagle", 2, **{switch: on})
    with pytest.raises(UserError, match=f"{words}.*train one with {switch} = {off}"):
        export(drafter, tmp_path / "d", "vllm", 5, VERIFIER)
    assert not (tmp_path / "d").exists()


def test_five_taps_are_exported(target: Target, tmp_path: Path):
    config = config_for(
        target, "p-eagle", 2, (1, 2, 3, 5, 6), MASK, norm_before_fc=True, fc_norm=True
    )
    drafter = untrained_drafter(config, target, seed=7)
    export(drafter, tmp_path / "d", "vllm", 5, VERIFIER)
    assert checkpoint.read(tmp_path / "d").config.aux_layer_ids == (1, 2, 3, 5, 6)


def test_check_reports_left_out_parts(target: Target, tmp_path: Path):
    compact.save(random_drafter(target, **MORE), tmp_path / "d", target)
    findings = [(finding.level, finding.text) for finding in check(tmp_path / "d", target)]
    assert ("warning", subset_notice(checkpoint.read(tmp_path / "d").config)) in findings
    assert sum("56 of 56 drafts identical" in text for _, text in findings) == 2
    compact.save(random_drafter(target, inject=True), tmp_path / "e", target)
    assert any("taps in every layer" in finding.text for finding in check(tmp_path / "e", target))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny_folder(tmp_path_factory.mktemp("lacking"))
    target = load(str(root / "target"), device="cpu", dtype="float32").target
    compact.save(random_drafter(target, **MORE), root / "more", target)
    compact.save(random_drafter(target, inject=True), root / "injected", target)
    write_set(root / "humaneval.jsonl", 3)
    return root


def run(*words: object, code: int = 0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


@pytest.mark.parametrize("options", [[], ["--jump"]])
def test_evaluate_as_vllm(tiny: Path, tmp_path: Path, options: list[str]):
    """`--as-vllm` gives the same counts as the exported drafter."""
    given = [
        "evaluate",
        tiny / "target",
        "--set",
        tiny / "humaneval.jsonl",
        "-k",
        4,
        "--max-tokens",
        16,
        "--json",
        *options,
    ]
    given += ["--device", "cpu", "--dtype", "float32", "--json"]
    run("export", tiny / "more", tmp_path / "d", "--target", tiny / "target", "--dtype", "float32")
    as_vllm = run(*given, "--drafter", tiny / "more", "--as-vllm")
    subset = json.loads(as_vllm.stdout)
    exported = json.loads(run(*given, "--drafter", tmp_path / "d").stdout)
    assert "left out" in as_vllm.stderr and subset["as_vllm"] and "as_vllm" not in exported
    counts = [(result["drafts"], result["accepted"]) for result in subset["results"]]
    assert counts == [(result["drafts"], result["accepted"]) for result in exported["results"]]
    refused = run(*given, "--drafter", tiny / "injected", "--as-vllm", code=2)
    assert "train one with inject = false" in refused.stderr


def test_export_reports_left_out_parts(tiny: Path, tmp_path: Path):
    given = ["export", tiny / "more", tmp_path / "d", "--target", tiny / "target"]
    result = run(*given)
    assert "dependency and confidence and calibration" in result.stderr
    assert "--as-vllm" in result.stderr
    assert json.loads(run(*given, "--json").stdout)["left_out"] == [
        "dependency",
        "confidence",
        "calibration",
    ]
    assert "inject = false" in run("export", tiny / "injected", tmp_path / "e", code=2).stderr


def test_deploy_reports_left_out_parts(tiny: Path):
    assert (
        subset_notices(tiny / "p-eagle") == [] and "dependency" in subset_notices(tiny / "more")[0]
    )
