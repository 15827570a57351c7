"""An endpoint on a fake AWS: created, repeated, changed, failing at every step, deleted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import pytest
from botocore.stub import ANY, Stubber
from moto.sagemaker.models import FakeEndpoint

from peagle.deploy.sagemaker.operate.apply import StackUpdate, StepResult, contains
from peagle.deploy.sagemaker.operate.clients import Clients
from peagle.deploy.sagemaker.operate.delete import delete, exclusive_prefixes, find_deletions
from peagle.deploy.sagemaker.operate.status import endpoint_status
from peagle.deploy.sagemaker.plan.artifact import Artifact
from peagle.deploy.sagemaker.plan.choices import Autoscale
from peagle.deploy.sagemaker.resources.stack import Stack
from peagle.errors import UserError
from tests.support.deploy.aws import (
    NAME,
    REGION,
    aws,
    existing_names,
    refuse,
    scaled_stack,
    sleep,
    weights,
)

__all__ = ["aws", "weights"]
Weights = tuple[Artifact, Artifact]
KINDS = [
    "model",
    "endpoint config",
    "alarm",
    "alarm",
    "endpoint",
    "scalable target",
    "scaling policy",
]


def apply(stack: Stack, aws: Clients, wait: bool = False) -> list[StepResult]:
    return StackUpdate(stack, aws, wait, sleep=sleep).apply()


def test_a_stack_is_created_once(aws: Clients, weights: Weights) -> None:
    first = apply(scaled_stack(weights), aws)
    assert [step.kind for step in first] == KINDS
    assert {step.outcome for step in first} == {"created"}
    before = existing_names(aws)
    assert len(before) == len(KINDS)
    again = apply(scaled_stack(weights), aws, wait=True)
    assert {step.outcome for step in again} == {"unchanged"}
    assert existing_names(aws) == before


def test_a_second_run_only_reads(
    aws: Clients, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(scaled_stack(weights), aws)
    called: list[str] = []
    real = Clients.call
    monkeypatch.setattr(
        Clients, "call", lambda self, call: called.append(call.operation) or real(self, call)
    )
    apply(scaled_stack(weights), aws)
    assert called and all(operation.startswith("Describe") for operation in called)


def test_the_container_reads_the_uploads(aws: Clients, weights: Weights) -> None:
    stack = scaled_stack(weights)
    apply(stack, aws)
    model = aws["sagemaker"].describe_model(ModelName=stack.resources[0].name)
    container = model["PrimaryContainer"]
    assert container["ModelDataSource"]["S3DataSource"]["S3Uri"] == stack.uploads[0].uri
    (channel,) = container["AdditionalModelDataSources"]
    assert channel["ChannelName"] == "eagle"
    assert channel["S3DataSource"]["S3Uri"] == stack.uploads[1].uri


def test_new_scaling_limits_change_only_the_scalable_target(aws: Clients, weights: Weights) -> None:
    apply(scaled_stack(weights), aws)
    done = apply(scaled_stack(weights, autoscale=Autoscale(2, 6, 8)), aws)
    assert {step.kind: step.outcome for step in done if step.outcome != "unchanged"} == {
        "scalable target": "changed"
    }
    assert endpoint_status(aws, NAME)["autoscale"] == {"min": 2, "max": 6}


@pytest.mark.parametrize(
    ("operation", "mentions"),
    [
        ("CreateModel", ""),
        ("CreateEndpointConfig", ""),
        ("PutMetricAlarm", "errors"),
        ("PutMetricAlarm", "latency"),
        ("CreateEndpoint", ""),
        ("RegisterScalableTarget", ""),
        ("PutScalingPolicy", ""),
    ],
)
def test_a_failed_step_is_rolled_back(
    operation: str, mentions: str, aws: Clients, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, operation, mentions)
    with pytest.raises(UserError, match="no quota") as error:
        apply(scaled_stack(weights), aws)
    assert existing_names(aws) == []
    assert f"/aws/sagemaker/Endpoints/{NAME}" in str(error.value)
    assert "Service Quotas" in str(error.value)


def test_an_endpoint_that_does_not_start(
    aws: Clients, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FakeEndpoint.__init__

    def failing(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.endpoint_status = "Failed"
        self.failure_reason = "the container did not pass /ping"

    monkeypatch.setattr(FakeEndpoint, "__init__", failing)
    with pytest.raises(UserError, match="did not pass /ping") as error:
        apply(scaled_stack(weights, autoscale=None), aws, wait=True)
    assert existing_names(aws) == []
    assert f"/aws/sagemaker/Endpoints/{NAME}" in str(error.value) and f"endpoint {NAME}" in str(
        error.value
    )
    # Without waiting, the failure is not detected.
    apply(scaled_stack(weights, autoscale=None), aws)
    assert endpoint_status(aws, NAME)["failure_reason"] == "the container did not pass /ping"
    with pytest.raises(UserError, match=f"peagle sagemaker delete {NAME}"):
        apply(scaled_stack(weights, autoscale=None), aws)
    assert NAME in existing_names(aws), "resources of an earlier run are not rolled back"


def test_failed_rollbacks_are_reported(
    aws: Clients, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, "CreateEndpoint")
    refuse(monkeypatch, "DeleteModel")
    with pytest.raises(UserError, match=f"NOT rolled back, remove it by hand: model {NAME}-"):
        apply(scaled_stack(weights), aws)
    assert len(existing_names(aws)) == 1


def test_deletion_includes_resources_of_earlier_updates(aws: Clients, weights: Weights) -> None:
    apply(scaled_stack(weights), aws)
    old = scaled_stack(weights, k=3).resources[:2]
    for resource in old:
        aws.call(resource.create)
    assert exclusive_prefixes(aws, NAME) == [upload.uri for upload in scaled_stack(weights).uploads]
    apply(scaled_stack(weights, name="peagle-tiny-2"), aws)
    other = [name for name in existing_names(aws) if "peagle-tiny-2" in name]
    assert exclusive_prefixes(aws, NAME) == [], "another endpoint uses the same weights"
    deletions = find_deletions(aws, NAME)
    assert len(deletions) == len(KINDS) + len(old)
    delete(aws, NAME, deletions, lambda line: None, sleep)
    assert existing_names(aws) == other
    assert find_deletions(aws, NAME) == []


def test_status_of_an_endpoint(aws: Clients, weights: Weights) -> None:
    apply(scaled_stack(weights), aws)
    summary = endpoint_status(aws, NAME)
    assert summary["status"] == "InService" and summary["region"] == REGION
    assert summary["instances"] == {"AllTraffic": {"now": 1, "wanted": 1}}
    assert summary["autoscale"] == {"min": 1, "max": 4}
    assert set(summary["alarms"]) == {f"{NAME}-errors", f"{NAME}-latency"}
    assert '"num_speculative_tokens":5' in summary["models"][0]["speculative_config"]
    with pytest.raises(UserError, match="no endpoint 'other'"):
        endpoint_status(aws, "other")


def endpoint(config: str, state: str = "InService", **more: Any) -> dict[str, Any]:
    arn = f"arn:aws:sagemaker:{REGION}:123456789012:endpoint/{NAME}"
    times = {"CreationTime": 0, "LastModifiedTime": 0}
    return (
        {
            "EndpointName": NAME,
            "EndpointArn": arn,
            "EndpointConfigName": config,
            "EndpointStatus": state,
        }
        | times
        | more
    )


@contextmanager
def updating(aws: Clients, stack: Stack) -> Iterator[Stubber]:
    """An endpoint with the config `old` exists; moto does not support update_endpoint."""
    client = boto3.client("sagemaker", region_name=REGION)
    aws._clients["sagemaker"] = client
    model, config = stack.resources[:2]
    update = stack.resources[4].update
    assert update is not None
    with Stubber(client) as stub:
        for resource, operation in ((model, "model"), (config, "endpoint_config")):
            stub.add_client_error(
                f"describe_{operation}", "ValidationException", f"Could not find {operation}"
            )
            arn = {"model": "ModelArn", "endpoint_config": "EndpointConfigArn"}[operation]
            stub.add_response(
                f"create_{operation}",
                {arn: "arn:aws:sagemaker:xxxxxxxx"},
                resource.create.parameters,
            )
        stub.add_response("describe_endpoint", endpoint("old"), {"EndpointName": NAME})
        stub.add_response(
            "update_endpoint", {"EndpointArn": endpoint("old")["EndpointArn"]}, update.parameters
        )
        yield stub
        stub.assert_no_pending_responses()


def test_an_endpoint_is_updated(aws: Clients, weights: Weights) -> None:
    stack = scaled_stack(weights, autoscale=None)
    with updating(aws, stack) as stub:
        stub.add_response("describe_endpoint", endpoint("old"))  # the update has not started yet
        stub.add_response("describe_endpoint", endpoint("old", "Updating"))
        stub.add_response("describe_endpoint", endpoint(stack.resources[1].name))
        done = apply(stack, aws, wait=True)
    assert [step.outcome for step in done] == [*["created"] * 4, "changed"]


def test_an_update_that_sagemaker_rolls_back(aws: Clients, weights: Weights) -> None:
    stack = scaled_stack(weights, autoscale=None)
    with updating(aws, stack) as stub:
        stub.add_response("describe_endpoint", endpoint("old", "RollingBack"))
        stub.add_response(
            "describe_endpoint", endpoint("old", FailureReason="alarm peagle-tiny-errors went off")
        )
        stub.add_response("describe_endpoint", endpoint("old"))  # SageMaker has already rolled back
        stub.add_response(
            "delete_endpoint_config", {}, {"EndpointConfigName": stack.resources[1].name}
        )
        stub.add_response("delete_model", {}, {"ModelName": stack.resources[0].name})
        with pytest.raises(UserError, match=r"rolled back: alarm peagle-tiny-errors went off"):
            apply(stack, aws, wait=True)
    assert aws["cloudwatch"].describe_alarms()["MetricAlarms"] == []


def test_a_failure_after_an_update_rolls_it_back(
    aws: Clients, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = scaled_stack(weights)
    refuse(monkeypatch, "RegisterScalableTarget")
    new = stack.resources[1].name
    with updating(aws, stack) as stub:
        stub.add_response("describe_endpoint", endpoint(new))
        stub.add_response("describe_endpoint", endpoint(new))
        arn = {"EndpointArn": endpoint("old")["EndpointArn"]}
        stub.add_response(
            "update_endpoint", arn, {"EndpointName": NAME, "EndpointConfigName": "old"}
        )
        stub.add_response("describe_endpoint", endpoint("old"))
        stub.add_response("delete_endpoint_config", {}, {"EndpointConfigName": new})
        stub.add_response("delete_model", {}, {"ModelName": ANY})
        with pytest.raises(UserError, match=f"rolled back: change of endpoint {NAME}"):
            apply(stack, aws)


def test_a_changed_alarm_is_restored(
    aws: Clients, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(scaled_stack(weights), aws)
    (alarm,) = (r for r in scaled_stack(weights).resources if r.name == f"{NAME}-errors")
    theirs = alarm.create.parameters | {"Threshold": 77.0}
    aws["cloudwatch"].put_metric_alarm(**theirs)
    refuse(monkeypatch, "PutMetricAlarm", "latency")
    aws["cloudwatch"].delete_alarms(AlarmNames=[f"{NAME}-latency"])
    with pytest.raises(UserError, match="change of alarm"):
        apply(scaled_stack(weights), aws)
    (now,) = aws["cloudwatch"].describe_alarms(AlarmNames=[alarm.name])["MetricAlarms"]
    assert now["Threshold"] == 77.0


def test_contains_compares_nested_values() -> None:
    assert contains({"a": 1, "b": [{"c": 2, "d": 3}]}, {"b": [{"c": 2}]})
    assert not contains({"b": [{"c": 2}, {}]}, {"b": [{"c": 2}]})
    assert (
        not contains({}, {"a": None})
        and not contains([1], {"a": 1})
        and not contains({"a": 1}, {"a": 2})
    )


def test_missing_credentials_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UserError, match="no AWS credentials: run `aws configure`"):
        assert Clients(REGION).session
    with pytest.raises(UserError, match="nobody"):
        assert Clients(REGION, "nobody").session
