"""`peagle verify sagemaker://NAME`: evidence from answers, container logs and environment."""

import json
import time
from typing import Any

import pytest
from typer.testing import CliRunner

from peagle.cli import app
from peagle.deploy.sagemaker.operate import spec_log
from peagle.deploy.sagemaker.operate.clients import Clients
from peagle.deploy.sagemaker.operate.speculation import ContainerSpec, config_problem
from peagle.deploy.sagemaker.plan.choices import DEFAULT_IMAGE
from tests.support.deploy.aws import NAME, REGION, ROLE, aws
from tests.support.deploy.sagemaker_runtime import Runtime, runtime

__all__ = ["aws", "runtime"]
VALID = '{"model": "/opt/eagle", "num_speculative_tokens": 5}'
CONFIG = {"SM_VLLM_SPECULATIVE_CONFIG": VALID}
SDK = {"OPTION_SPECULATIVE_DRAFT_MODEL": "/opt/ml/additional-model-data-sources/draft_model"}
WORK = (
    "INFO Engine 000: Avg prompt throughput: 5.1 tokens/s, Avg generation throughput: {} tokens/s"
)
SPEC = (
    "INFO SpecDecoding metrics: Mean acceptance length: {}, Accepted throughput: 1.00 tokens/s,"
    " Drafted throughput: 3.00 tokens/s, Accepted: {} tokens, Drafted: {} tokens,"
    " Per-position acceptance rate: 0.700, Avg Draft acceptance rate: 33.3%"
)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_log, "POLL_SECONDS", 0.0)


def create_endpoint(aws: Clients, environment: dict[str, str], image: str = "") -> None:
    client = aws["sagemaker"]
    image = image or DEFAULT_IMAGE.format(region=REGION)
    client.create_model(
        ModelName="model",
        ExecutionRoleArn=ROLE,
        PrimaryContainer={"Image": image, "Environment": environment},
    )
    variant = {
        "VariantName": "v",
        "ModelName": "model",
        "InstanceType": "ml.g7e.2xlarge",
        "InitialInstanceCount": 1,
    }
    client.create_endpoint_config(EndpointConfigName="config", ProductionVariants=[variant])
    client.create_endpoint(EndpointName=NAME, EndpointConfigName="config")


def write_log(aws: Clients, *lines: str) -> None:
    group = f"/aws/sagemaker/Endpoints/{NAME}"
    aws["logs"].create_log_group(logGroupName=group)
    aws["logs"].create_log_stream(logGroupName=group, logStreamName="i-1")
    soon = int(time.time() * 1000) + 60_000
    events = [{"timestamp": soon, "message": line} for line in lines]
    aws["logs"].put_log_events(logGroupName=group, logStreamName="i-1", logEvents=events)


def run(*words: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [*words, "--region", REGION, "--json"])
    assert result.exit_code == code, result.output + repr(result.exception)
    return json.loads(result.stdout) if code != 2 else result.stderr


def verify(code: int = 0) -> Any:
    return run("verify", f"sagemaker://{NAME}", code=code)


def test_answers_with_metrics(aws: Clients, runtime: Runtime) -> None:
    create_endpoint(aws, CONFIG)
    runtime.answer(accepted=6)
    result = verify()
    assert (result["proven"], result["evidence"]) == (True, "answers")
    assert (result["drafts"], result["accepted_tokens"]) == (16, 24)
    assert result["acceptance_length"] == 2.5


def test_evidence_in_the_container_log(aws: Clients, runtime: Runtime) -> None:
    create_endpoint(aws, CONFIG)
    runtime.answer()
    write_log(aws, WORK.format(51.2), SPEC.format("2.50", 60, 200), SPEC.format("1.50", 10, 100))
    result = verify()
    assert (result["proven"], result["evidence"]) == (True, "logs")
    assert (result["drafts"], result["draft_tokens"], result["accepted_tokens"]) == (60, 300, 70)
    assert result["acceptance_length"] == pytest.approx(1 + 70 / 60, abs=1e-4)


def test_the_variable_of_the_sdk_is_ignored_by_vllm(aws: Clients, runtime: Runtime) -> None:
    create_endpoint(aws, SDK)
    runtime.answer()
    write_log(aws, WORK.format(0.0), WORK.format(51.2))
    result = verify(code=1)
    assert (result["verdict"], result["evidence"]) == ("not speculating", "logs")
    assert "OPTION_SPECULATIVE_DRAFT_MODEL" in result["cause"]
    assert "SageMaker's SDK sets it, but vLLM ignores it" in result["cause"]
    assert "peagle deploy sagemaker" in result["fix"]


def test_the_environment_is_used_without_a_log(aws: Clients, runtime: Runtime) -> None:
    create_endpoint(aws, {})
    runtime.answer()
    result = verify(code=1)
    assert (result["verdict"], result["evidence"]) == ("not speculating", "configuration")
    assert result["cause"] == "the environment of the model has no SM_VLLM_SPECULATIVE_CONFIG"


def test_a_container_that_ignores_its_drafter(aws: Clients, runtime: Runtime) -> None:
    create_endpoint(aws, CONFIG)
    runtime.answer()
    write_log(aws, WORK.format(51.2))
    result = verify(code=1)
    assert "has a speculative config, but its container does not draft" in result["cause"]
    assert f"peagle sagemaker logs {NAME}" in result["fix"]


@pytest.mark.parametrize(
    ("environment", "image"), [(CONFIG, ""), ({}, "123.dkr.ecr.us-west-2.amazonaws.com/own:1")]
)
def test_missing_evidence(
    aws: Clients, runtime: Runtime, environment: dict[str, str], image: str
) -> None:
    create_endpoint(aws, environment, image)
    runtime.answer()
    result = verify(code=1)
    assert (result["verdict"], result["evidence"]) == ("unproven", None)
    assert f"allow logs:FilterLogEvents for /aws/sagemaker/Endpoints/{NAME}" in result["fix"]


def test_status_keeps_its_fields(aws: Clients, runtime: Runtime) -> None:
    create_endpoint(aws, CONFIG)
    runtime.answer(accepted=6)
    status = run("sagemaker", "status", NAME, "--verify")
    assert (status["endpoint"], status["status"]) == (NAME, "InService")
    assert status["verification"]["verdict"] == "speculating"
    assert "verification" not in run("sagemaker", "status", NAME)
    runtime.answer(accepted=0)
    status = run("sagemaker", "status", NAME, "--verify", code=1)
    assert "accepts none of the drafts" in status["verification"]["cause"]


def test_endpoint_that_does_not_answer(aws: Clients, runtime: Runtime) -> None:
    create_endpoint(aws, CONFIG)
    runtime.status = 424
    runtime.body = b'{"OriginalStatusCode": 503, "OriginalMessage": "loading", "Message": "m"}'
    assert "answered 503: loading" in " ".join(verify(code=2).split())


def test_counts_in_a_real_log() -> None:
    """Lines of vLLM 0.32.0 on a CPU; its /metrics counted 79 drafts and 99 accepted tokens."""
    prefix = "(APIServer pid=11871) INFO 11-16 23:11:57 [metrics.py:120] SpecDecoding metrics: "
    lines = [
        "Mean acceptance length: 2.34, Accepted throughput: 7.50 tokens/s, Drafted throughput:"
        " 28.02 tokens/s, Accepted: 83 tokens, Drafted: 310 tokens, Per-position acceptance rate:"
        " 0.516, 0.306, 0.226, 0.177, 0.113, Avg Draft acceptance rate: 26.8%",
        "Mean acceptance length: 1.94, Accepted throughput: 1.60 tokens/s, Drafted throughput:"
        " 8.50 tokens/s, Accepted: 16 tokens, Drafted: 85 tokens, Per-position acceptance rate:"
        " 0.706, 0.118, 0.059, 0.059, 0.000, Avg Draft acceptance rate: 18.8%",
    ]
    counts = spec_log.parse_counts([prefix + line for line in lines])
    assert counts is not None
    assert (counts.drafts, counts.draft_tokens, counts.accepted) == (79, 395, 99)
    assert spec_log.parse_counts(["Avg generation throughput: 3.2 tokens/s"]) is None


def test_defects_of_configurations() -> None:
    lmi = ContainerSpec("x/djl-inference:1", {"OPTION_SPECULATIVE_CONFIG": VALID})
    assert lmi.defect is None
    assert "not JSON" in str(config_problem("{'model': 'x'}"))
    assert "not an object" in str(config_problem("[]"))
    assert config_problem('{"model": "x"}') == "it has no num_speculative_tokens"
    altered = ContainerSpec("a/vllm:1", {"SM_VLLM_SPECULATIVE_CONFIG": "{}"})
    assert altered.surely_off
    assert "has no model and no num_speculative_tokens" in str(altered.defect)
