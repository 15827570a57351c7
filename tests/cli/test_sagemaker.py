"""The SageMaker commands with a fake AWS: deploy, verify, status and delete an endpoint."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from peagle.cli import app
from peagle.deploy import sagemaker
from peagle.deploy.sagemaker.operate import upload as uploading
from peagle.deploy.sagemaker.operate.clients import Clients
from tests.support.deploy.aws import REGION, ROLE, aws, existing_names, refuse
from tests.support.deploy.sagemaker_runtime import Runtime, runtime
from tests.support.server.serving import tiny_folder

__all__ = ["aws", "runtime"]
NAME = "peagle-target"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def s3(aws: Clients, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """S3 with SageMaker's default bucket, and a temporary cache folder."""
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    where = {"LocationConstraint": REGION}
    aws["s3"].create_bucket(
        Bucket=f"sagemaker-{REGION}-123456789012", CreateBucketConfiguration=where
    )
    return aws["s3"]


def run(*words: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [*map(str, words), "--region", REGION])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def deploy(tiny: Path, *words: object, code: int = 0) -> Any:
    given = [
        "--drafter",
        tiny / "p-eagle",
        "--role",
        ROLE,
        "--instance",
        "ml.g7e.2xlarge",
        "-k",
        3,
        "--context",
        128,
    ]
    return run("deploy", "sagemaker", tiny / "target", *given, *words, code=code)


def uploaded(s3: Any) -> list[str]:
    return [
        entry["Key"]
        for entry in s3.list_objects_v2(Bucket=f"sagemaker-{REGION}-123456789012").get(
            "Contents", []
        )
    ]


def test_an_endpoint_is_created_and_deleted(
    tiny: Path, aws: Clients, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = json.loads(deploy(tiny, "--dry-run").stdout)
    assert uploaded(s3) == [] and existing_names(aws) == []
    report = json.loads(deploy(tiny, "--wait", "--json").stdout)
    assert {step["what"] for step in report["steps"]} == {"created"}
    (model,) = [
        step["parameters"]["ModelName"]
        for step in planned
        if step.get("operation") == "CreateModel"
    ]
    assert model in existing_names(aws), "the dry run printed the name of the created model"
    names = [key.rsplit("/", 2)[-2:] for key in uploaded(s3)]
    assert ["target", "model.safetensors"] in names and ["target", "tokenizer.json"] in names
    assert [name for folder, name in names if folder.startswith("eagle-")] == [
        "config.json",
        "model.safetensors",
    ]
    monkeypatch.setattr(uploading, "upload_file", None)  # A second upload would raise an error.
    assert "nothing changed" in deploy(tiny, "--wait").stdout
    assert json.loads(run("sagemaker", "status", NAME, "--json").stdout)["status"] == "InService"
    assert "InService" in run("sagemaker", "status", NAME).stdout
    assert run("sagemaker", "delete", NAME, "--weights", "--yes").exit_code == 0
    assert existing_names(aws) == [] and uploaded(s3) == []
    assert "check --region" in run("sagemaker", "delete", NAME, "--yes", code=2).stderr


def test_a_failure_removes_everything_but_the_weights(
    tiny: Path, aws: Clients, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, "CreateEndpoint")
    message = " ".join(deploy(tiny, code=2).stderr.split())
    assert (
        "no quota" in message
        and f"/aws/sagemaker/Endpoints/{NAME}" in message
        and "weights stay" in message
    )
    assert existing_names(aws) == [] and uploaded(s3)


def test_upload_only_sends_only_the_weights(tiny: Path, aws: Clients, s3: Any) -> None:
    assert "the weights are in s3://" in deploy(tiny, "--upload-only").stdout
    assert existing_names(aws) == [] and len(uploaded(s3)) >= 4


def test_the_endpoint_is_verified(tiny: Path, aws: Clients, s3: Any, runtime: Runtime) -> None:
    runtime.answer(accepted=6)
    report = json.loads(deploy(tiny, "--verify", "--json").stdout)
    assert {step["what"] for step in report["steps"]} == {"created"}
    assert report["verification"]["acceptance_length"] == 2.5
    assert "speculating" in deploy(tiny, "--verify").stdout
    runtime.answer(accepted=0)
    assert "nothing changed" in deploy(tiny, "--verify", code=1).stdout


def test_without_confirmation_nothing_is_deleted(tiny: Path, aws: Clients, s3: Any) -> None:
    deploy(tiny)
    before = existing_names(aws)
    run("sagemaker", "delete", NAME, code=1)
    assert existing_names(aws) == before


def test_missing_credentials_are_reported_before_any_download(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    assert "run `aws configure`" in deploy(tiny, code=2).stderr
    assert not (tmp_path / "home").exists()


def test_the_dry_run_works_without_boto3(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    hidden = (
        "import sys; sys.modules['boto3'] = sys.modules['botocore'] = None;"
        " from peagle.cli import app; app()"
    )
    words = ["deploy", "sagemaker", "gpt-oss-20b", "--role", ROLE, "--region", REGION, "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-c", hidden, *words], capture_output=True, text=True, check=True
    )
    assert any(step.get("operation") == "CreateEndpoint" for step in json.loads(done.stdout))
    monkeypatch.setattr(sagemaker, "find_spec", lambda name: None)
    assert "pip install 'peagle[deploy]'" in deploy(tiny, code=2).stderr


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--startup-seconds", 30], "--startup-seconds is 30"),
        (["--autoscale", 3, 1, 8], "--autoscale is 3 1"),
        (["--name", "a_b"], "--name 'a_b'"),
        (["--from-hub", "--isolated"], "--from-hub needs the network: omit --isolated"),
        (["--count", 0], "--count is 0"),
        (["--gpus", 9], "--gpus is 9"),
    ],
)
def test_errors_name_the_options(tiny: Path, words: list[object], option: str) -> None:
    assert option in deploy(tiny, *words, "--dry-run", code=2).stderr
