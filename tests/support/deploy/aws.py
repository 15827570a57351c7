"""A fake AWS (moto), and a tiny target and drafter to deploy on it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from moto import mock_aws
from moto.sagemaker.models import FakeEndpointConfig

from peagle.deploy.sagemaker.operate.clients import Clients
from peagle.deploy.sagemaker.plan.artifact import Artifact, hash_folder
from peagle.deploy.sagemaker.plan.choices import Autoscale, EndpointSettings
from peagle.deploy.sagemaker.resources.calls import Call
from peagle.deploy.sagemaker.resources.stack import Stack, build_stack
from peagle.deploy.spec import Deployment

REGION = "us-west-2"
ACCOUNT = "123456789012"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/service/SageMaker"
NAME = "peagle-tiny"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_SESSION_TOKEN": "testing",
}


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clients]:
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        FakeEndpointConfig, "validate_instance_type", lambda self, type: None
    )  # moto's list ends in 2020
    with mock_aws():
        yield Clients(REGION)


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Artifact, Artifact]:
    """A target of two files, one in a subfolder, and a drafter."""
    contents = {
        "target": {"config.json": b"{}", "sub/model.safetensors": b"t" * 1000},
        "drafter": {"config.json": b"{ }"},
    }
    for kind, files in contents.items():
        for name, data in files.items():
            path = tmp_path / kind / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    target = tmp_path / "target"
    drafter = tmp_path / "drafter"
    return (
        Artifact("t", hash_folder(target), target),
        Artifact("d", hash_folder(drafter), drafter),
    )


def deployment(**changes: Any) -> Deployment:
    flags = {"enforce-eager": True, "limit-mm-per-prompt": {"image": 0}}
    given: dict[str, Any] = {
        "pair": "tiny",
        "target": "org/tiny",
        "drafter": "org/drafter",
        "method": "p-eagle",
        "k": 5,
        "vllm": "0.27.1",
        "context": 4096,
        "flags": flags,
    }
    return Deployment(**given | changes)


def endpoint_settings(**changes: Any) -> EndpointSettings:
    given: dict[str, Any] = {
        "name": NAME,
        "role": ROLE,
        "instance": "ml.g7e.2xlarge",
        "region": REGION,
        "bucket": "s3://weights/peagle",
    }
    return EndpointSettings(**given | changes)


def scaled_stack(weights: tuple[Artifact, Artifact], k: int = 5, **changes: Any) -> Stack:
    given = {"autoscale": Autoscale(1, 4, 8)} | changes
    return build_stack(endpoint_settings(**given), deployment(k=k), *weights)


def existing_names(aws: Clients) -> list[str]:
    """The names of all resources except those of S3."""
    sagemaker = aws["sagemaker"]
    names = [entry["ModelName"] for entry in sagemaker.list_models()["Models"]]
    names += [
        entry["EndpointConfigName"]
        for entry in sagemaker.list_endpoint_configs()["EndpointConfigs"]
    ]
    names += [entry["EndpointName"] for entry in sagemaker.list_endpoints()["Endpoints"]]
    names += [entry["AlarmName"] for entry in aws["cloudwatch"].describe_alarms()["MetricAlarms"]]
    scaling = aws["application-autoscaling"]
    names += [
        entry["ResourceId"]
        for entry in scaling.describe_scalable_targets(ServiceNamespace="sagemaker")[
            "ScalableTargets"
        ]
    ]
    names += [
        entry["PolicyName"]
        for entry in scaling.describe_scaling_policies(ServiceNamespace="sagemaker")[
            "ScalingPolicies"
        ]
    ]
    return names


def refuse(monkeypatch: pytest.MonkeyPatch, operation: str, name: str = "") -> None:
    """Let AWS refuse calls whose parameters mention `name`."""
    real = Clients.call

    def call(self: Clients, call: Call) -> dict[str, Any]:
        if call.operation == operation and name in str(call.parameters):
            response = {"Error": {"Code": "ResourceLimitExceeded", "Message": "no quota"}}
            raise ClientError(response, operation)
        return real(self, call)

    monkeypatch.setattr(Clients, "call", call)


def sleep(seconds: float) -> None:
    """Return at once, because a fake AWS needs no waiting."""
