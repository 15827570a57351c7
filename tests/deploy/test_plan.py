"""The deployment planned for a pair and options: K, versions, drafters, names; written files."""

import filecmp
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from peagle.cli import app
from peagle.deploy.spec import Deployment
from peagle.deploy.version import TESTED_VLLM
from peagle.drafter.formats import checkpoint, compact
from peagle.errors import UserError
from tests.support.command_line import run
from tests.support.deploy.deploying import documents, planned, speculative_config
from tests.support.models.tiny_models import make_drafter, make_target

SHIPPED = str(Path(__file__).parents[2] / "peagle" / "drafters" / "smollm2-135m" / "p-eagle")


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_CONFIG", str(tmp_path / "config"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a target, and of its drafter in the compact format."""
    root = tmp_path_factory.mktemp("tiny")
    target = make_target()
    target.name = str(root / "target")
    target.model.save_pretrained(root / "target")
    compact.save(make_drafter(target, "p-eagle", 2), root / "drafter", target)
    return root


@pytest.mark.parametrize(
    ("pair", "options", "k"),
    [
        ("gpt-oss-20b", {}, 7),
        ("gpt-oss-120b", {}, 5),
        ("gpt-oss-120b", {"concurrency": 1}, 7),
        ("gpt-oss-120b", {"concurrency": 64}, 3),
        ("gpt-oss-120b", {"concurrency": 64, "k": 4}, 4),
        ("qwen3-coder-30b", {"concurrency": 8}, 11),
        ("qwen3-coder-30b", {"concurrency": 32}, 7),
        ("gpt-oss-20b", {"concurrency": 8}, 7),
        ("gemma-4-31b", {}, 3),
    ],
)
def test_k_of_a_deployment(pair: str, options: dict[str, Any], k: int) -> None:
    deployment = planned("vllm", pair, **options)
    assert deployment.k == k
    unknown = any("the best K at 8 requests is unknown" in note for note in deployment.notes)
    assert unknown is (pair == "gpt-oss-20b" and options != {})


@pytest.mark.parametrize(
    ("pair", "options", "message"),
    [
        ("gpt-oss-20b", {"k": 11}, "trained to depth 10: lower `k` to 10"),
        ("gpt-oss-20b", {"k": 0}, "at least one token"),
        ("gpt-oss-20b", {"vllm": "0.17.2"}, "needs vLLM 0.18 or later"),
        ("qwen3-8b", {"vllm": "0.21.0"}, "needs vLLM 0.22 or later"),
        ("qwen3-coder-30b", {"vllm": "0.15.0"}, "needs vLLM 0.16 or later"),
        ("gpt-oss-20b", {"vllm": "latest"}, "is not a version"),
        ("gpt-oss-20b", {"vllm": "0.27"}, "does not name an image"),
        ("qwen2.5-coder-1.5b", {}, "no trained drafter yet: give one with `drafter`"),
        ("gpt-oss-20b", {"drafter": "nowhere"}, "neither a folder nor a hub id"),
        ("gpt-os-20b", {}, "Did you mean 'gpt-oss-20b'"),
        ("gpt-oss-20b", {"name": "vllm"}, "must not be or begin with vllm"),
        ("gpt-oss-20b", {"name": "Mine_"}, "`name` must consist of a-z"),
        ("gpt-oss-20b", {"gpus": 0}, "`gpus` must be 1 or more; it is 0"),
        ("gpt-oss-20b", {"port": 80}, "`port` must be in 1024..65535"),
        ("gpt-oss-20b", {"replicas": 0}, "`replicas` must be 1 or more"),
        ("gpt-oss-20b", {"image": "mine"}, "has no version: give NAME:TAG"),
        ("gpt-oss-20b", {"served_model_name": "a b"}, "without spaces"),
        (
            "gpt-oss-20b",
            {"gpu": "H100\nrun: evil"},
            "`gpu` must be the name of a GPU type",
        ),
        ("gpt-oss-20b", {"served_model_name": "a\x00b"}, "control characters"),
        ("gpt-oss-20b", {"context": 0}, "`context` must be 2 or more"),
        ("gpt-oss-20b", {"method": "eagle3"}, "has no eagle3 drafter"),
        ("gpt-oss-20b", {"method": "none"}, "a deployment needs a drafter"),
        (
            "smollm2-135m",
            {"drafter": SHIPPED, "method": "eagle3"},
            "holds a p-eagle drafter, not eagle3",
        ),
    ],
)
def test_mistakes_are_reported(pair: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        planned("kubernetes", pair, **options)


@pytest.mark.parametrize("kind", ["kubernetes", "sagemaker"])
def test_a_gguf_file_is_not_deployed(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"is a GGUF file.* with config\.json and safetensors"):
        planned(kind, str(file), drafter=SHIPPED)


@pytest.mark.parametrize(
    "flags", [{"dtype\nrun: evil": True}, {"a b": 1}, {"": 1}, {"dtype": "half\nrun: evil"}]
)
def test_flags_cannot_inject_yaml(flags: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"`flags`: "):
        replace(planned("kubernetes"), flags=flags)


def test_vllm_versions_and_images() -> None:
    assert planned("compose").image == f"vllm/vllm-openai:v{TESTED_VLLM}"
    assert planned("ray").vllm != TESTED_VLLM, "the Ray image contains its own vLLM"
    assert any("temperatures above 0" in note for note in planned("vllm", vllm="0.19.0").notes)
    assert any("unknown" in note for note in planned("vllm", "gemma-4-31b").notes)
    assert planned("vllm", image="registry.local:5000/mine@sha256:abc").image.endswith("abc")


def test_long_contexts_have_their_own_drafter() -> None:
    assert planned("vllm", context=32_768).drafter == "amazon/GPT-OSS-20B-P-EAGLE-long-context"
    assert planned("vllm", context=8_192).drafter == "amazon/GPT-OSS-20B-P-EAGLE"
    assert planned("vllm", context=32_768).need_gb > planned("vllm").need_gb
    assert planned("vllm", "qwen3-coder-30b", context=32_768).drafter.endswith("-P-EAGLE")


def test_a_drafter_of_the_hub_is_passed_through() -> None:
    deployment = planned("vllm", "qwen2.5-coder-0.5b", drafter="someone/head")
    assert (
        deployment.drafter == "someone/head"
        and not deployment.local
        and deployment.method == "p-eagle"
    )
    assert (
        planned("vllm", "gemma-4-31b", drafter="someone/head").speculative_config[
            "parallel_drafting"
        ]
        is False
    )
    given = planned("vllm", "gemma-4-31b", drafter="someone/head", method="p-eagle")
    assert (
        given.speculative_config["parallel_drafting"] is True
        and "VLLM_USE_V2_MODEL_RUNNER" in given.environment
    )
    assert planned("vllm", "smollm2-135m", method="eagle3").method == "eagle3"


def test_resources_follow_the_pair() -> None:
    small = planned("kubernetes", "smollm2-135m")
    large = planned("kubernetes", "gpt-oss-120b")
    assert small.gpu_gb < 2 and 70 < large.gpu_gb < 80 and large.disk_gb > 100
    assert planned("kubernetes", "gpt-oss-120b", gpus=2).gpu_gb < 40
    unknown = Deployment("x", "a/b", "c/d", "p-eagle", 3, TESTED_VLLM)
    assert unknown.gpu_gb is None and unknown.disk_gb == 200


def test_unchanged_files_are_not_written_again(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    first = json.loads(run("deploy", "kubernetes", "gpt-oss-20b", "--out", out, "--json"))
    assert (
        sorted(Path(path).name for path in first["written"])
        == sorted(first["files"])
        == sorted(os.listdir(out))
    )
    again = json.loads(run("deploy", "kubernetes", "gpt-oss-20b", "--out", out, "--json"))
    assert again["written"] == [] and again["next"] == first["next"]
    before = (out / "deployment.yaml").read_text()
    output = run("deploy", "kubernetes", "gpt-oss-20b", "--out", out, "-k", 3, code=2)
    assert "holds other versions of deployment.yaml: --force" in output
    assert (out / "deployment.yaml").read_text() == before
    changed = json.loads(
        run("deploy", "kubernetes", "gpt-oss-20b", "--out", out, "-k", 3, "--force", "--json")
    )
    assert [Path(path).name for path in changed["written"]] == ["deployment.yaml"]
    (out / "service.yaml").unlink()
    (out / "service.yaml").mkdir()
    assert "is not a file" in run(
        "deploy", "kubernetes", "gpt-oss-20b", "--out", out, "-k", 3, "--force", code=2
    )


def test_the_next_steps_are_printed(tmp_path: Path) -> None:
    output = run("deploy", "vllm", "gemma-4-31b", "--out", tmp_path)
    assert f"{tmp_path}/serve.sh" in output.replace("\n", "")
    assert os.access(tmp_path / "serve.sh", os.X_OK)
    assert "the memory gemma" not in output
    assert "--out" in CliRunner().invoke(app, ["deploy", "vllm", "gemma-4-31b"]).stderr


def test_a_local_pair_is_exported_and_mounted(tiny: Path, tmp_path: Path) -> None:
    words = [
        "deploy",
        "compose",
        tiny / "target",
        "--drafter",
        tiny / "drafter",
        "--out",
        tmp_path,
        "--json",
    ]
    report = json.loads(run(*words))
    assert (
        report["target"] == "/models/target"
        and report["drafter"] == "/models/drafter"
        and report["name"] == "peagle-target"
    )
    assert report["notes"][0] == "this drafter is untrained: its drafts are noise"
    exported = checkpoint.read(tmp_path / "drafter")
    assert exported.format == "vllm" and not exported.problems()
    text = (tmp_path / "compose.yaml").read_text()
    server = documents({"compose.yaml": text})["compose.yaml"]["services"]["peagle-target-0"]
    assert server["volumes"][1:] == [
        "./drafter:/models/drafter:ro",
        f"{tiny / 'target'}:/models/target:ro",
    ]
    assert speculative_config("compose", {"compose.yaml": text})["model"] == "/models/drafter"
    assert json.loads(run(*words))["written"] == []
    assert sorted(os.listdir(tmp_path)) == [
        "compose.yaml",
        "drafter",
        "env.example",
        "prometheus.yml",
    ]


def test_another_drafter_is_only_replaced_with_force(tiny: Path, tmp_path: Path) -> None:
    words = [
        "deploy",
        "vllm",
        tiny / "target",
        "--drafter",
        tiny / "drafter",
        "--out",
        tmp_path / "out",
    ]
    run(*words)
    target = make_target()
    target.name = str(tiny / "target")
    other = make_drafter(target, "p-eagle", 2)
    other.fc.weight.data.mul_(2)
    compact.save(other, tmp_path / "other", target)
    words[4] = tmp_path / "other"
    before = (tmp_path / "out" / "drafter" / "model.safetensors").read_bytes()
    assert "holds another drafter: --force" in run(*words, code=2).replace("\n", "")
    assert (tmp_path / "out" / "drafter" / "model.safetensors").read_bytes() == before
    run(*words, "--force")
    assert (tmp_path / "out" / "drafter" / "model.safetensors").read_bytes() != before
    assert not [name for name in os.listdir(tmp_path / "out") if name.startswith(".")]


def test_a_drafter_in_vllm_format_needs_no_target(tiny: Path, tmp_path: Path) -> None:
    """The drafter is copied without a download of the target gpt-oss-20b."""
    run("deploy", "vllm", tiny / "target", "--drafter", tiny / "drafter", "--out", tmp_path / "one")
    run(
        "deploy",
        "vllm",
        "gpt-oss-20b",
        "--drafter",
        tmp_path / "one" / "drafter",
        "--out",
        tmp_path / "two",
    )
    names = ["config.json", "model.safetensors"]
    assert (
        filecmp.cmpfiles(
            tmp_path / "one" / "drafter", tmp_path / "two" / "drafter", names, shallow=False
        )[0]
        == names
    )


def test_skypilot_needs_a_gpu_type(tiny: Path, tmp_path: Path) -> None:
    words = [
        "deploy",
        "skypilot",
        tiny / "target",
        "--drafter",
        tiny / "drafter",
        "--out",
        tmp_path,
    ]
    assert "give a type with --gpu" in run(*words, code=2).replace("\n", " ")
    assert os.listdir(tmp_path) == []
