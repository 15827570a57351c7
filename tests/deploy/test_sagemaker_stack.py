"""The stack of an endpoint, its outputs, and limits that are checked before any AWS call."""

import json
import re
import socket
from functools import cache
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.model import ServiceModel
from botocore.validate import ParamValidator
from cfnlint.api import lint
from typer.testing import CliRunner

from peagle.catalog import find_pair
from peagle.catalog.catalog import shipped_pairs
from peagle.cli import app
from peagle.cli.deployment.deploy_sagemaker import container_variables, variable_settings
from peagle.deploy.sagemaker.output.cloudformation import cloudformation_template
from peagle.deploy.sagemaker.output.dry_run import dry_run_steps
from peagle.deploy.sagemaker.output.terraform import terraform_config
from peagle.deploy.sagemaker.plan import artifact
from peagle.deploy.sagemaker.plan.artifact import Artifact
from peagle.deploy.sagemaker.plan.choices import Autoscale
from peagle.deploy.sagemaker.plan.environment import container_environment
from peagle.deploy.sagemaker.plan.instances import instance_types, smallest_instance
from peagle.deploy.sagemaker.plan.limits import check_environment, check_memory
from peagle.deploy.sagemaker.plan.public_names import secret_names
from peagle.deploy.sagemaker.resources.calls import Call
from peagle.deploy.sagemaker.resources.stack import Stack, build_stack
from peagle.errors import UserError
from tests.support.deploy.aws import NAME, REGION, ROLE, deployment, endpoint_settings, scaled_stack

WEIGHTS = (
    Artifact("hub org/tiny at main", "0123456789ab"),
    Artifact("hub org/drafter at main", "ba9876543210"),
)
SCHEMA = json.loads((Path(__file__).parent / "terraform_schema.json").read_text())
PAIRS = [
    "gpt-oss-20b",
    "qwen3-8b",
    "gemma-4-31b",
    "qwen3-coder-30b",
    "gpt-oss-120b",
    "smollm2-135m",
]


def calls(stack: Stack) -> list[Call]:
    calls = [
        call
        for resource in stack.resources
        for call in (resource.create, resource.read, resource.delete, resource.update)
        if call
    ]
    return list({str(call): call for call in calls}.values())


@cache
def service(name: str) -> ServiceModel:
    return botocore.session.get_session().get_service_model(name)


def check_call(call: Call) -> None:
    """Check names, types, lengths and enumerations with botocore's model of the service."""
    model = service(call.service).operation_model(call.operation)
    report = ParamValidator().validate(call.parameters, model.input_shape)
    assert not report.has_errors(), report.generate_report()
    check_enums(call.parameters, model.input_shape)


def check_enums(value: Any, shape: Any) -> None:
    if shape.type_name == "structure":
        for name, member in value.items():
            check_enums(member, shape.members[name])
    elif shape.type_name == "list":
        for item in value:
            check_enums(item, shape.member)
    elif shape.type_name == "string" and shape.enum:
        assert value in shape.enum


@pytest.mark.parametrize("channel", [True, False])
def test_every_call_is_valid_for_the_aws_api(channel: bool) -> None:
    topic = f"arn:aws:sns:{REGION}:123456789012:pager"
    stack = build_stack(
        endpoint_settings(autoscale=Autoscale(1, 4, 8), notify=topic),
        deployment(),
        *WEIGHTS,
        channel=channel,
    )
    assert len(calls(stack)) == 3 + 3 + 6 + 4 + 6
    for call in calls(stack):
        check_call(call)
    with pytest.raises(AssertionError):
        check_call(Call("sagemaker", "CreateModel", {"ModelName": 7}))


def test_the_container_environment() -> None:
    (model, *_) = scaled_stack(WEIGHTS, variables={"HF_HOME": "/tmp"}).resources
    container = model.create.parameters["PrimaryContainer"]
    assert container["Environment"] == {
        "SM_VLLM_SERVED_MODEL_NAME": "tiny",
        "SM_VLLM_TENSOR_PARALLEL_SIZE": "1",
        "SM_VLLM_MAX_MODEL_LEN": "4096",
        "SM_VLLM_ENFORCE_EAGER": "true",
        "SM_VLLM_LIMIT_MM_PER_PROMPT": '{"image":0}',
        "SM_VLLM_SPECULATIVE_CONFIG": (
            '{"method":"eagle3","model":"/opt/ml/additional-model-data-sources/eagle",'
            '"num_speculative_tokens":5,"parallel_drafting":true}'
        ),
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HOME": "/tmp",
    }
    assert model.create.parameters["EnableNetworkIsolation"] is True


def test_weights_from_the_hub() -> None:
    stack = build_stack(
        endpoint_settings(from_hub=True, isolated=False), deployment(method="eagle3"), *WEIGHTS
    )
    assert stack.uploads == ()
    parameters = stack.resources[0].create.parameters
    variables = parameters["PrimaryContainer"]["Environment"]
    assert (
        variables["SM_VLLM_MODEL"] == "org/tiny"
        and "ModelDataSource" not in parameters["PrimaryContainer"]
    )
    assert json.loads(variables["SM_VLLM_SPECULATIVE_CONFIG"])["model"] == "org/drafter"
    assert json.loads(variables["SM_VLLM_SPECULATIVE_CONFIG"])["parallel_drafting"] is False
    assert (
        parameters["EnableNetworkIsolation"] is False
        and "VLLM_USE_V2_MODEL_RUNNER" not in variables
    )


def test_the_vocabulary_folder_of_gpt_oss(tmp_path: Path) -> None:
    (tmp_path / "o200k_base.tiktoken").write_text("x")
    here = Artifact("t", "0123456789ab", tmp_path)
    for channel, place in ((True, "/opt/ml/model"), (False, "/opt/ml/model/target")):
        (model, *_) = build_stack(
            endpoint_settings(), deployment(), here, WEIGHTS[1], channel=channel
        ).resources
        assert (
            model.create.parameters["PrimaryContainer"]["Environment"]["TIKTOKEN_ENCODINGS_BASE"]
            == place
        )


def test_names_depend_on_the_content() -> None:
    first, same, other = (scaled_stack(WEIGHTS, k=k) for k in (5, 5, 3))
    names = [[resource.name for resource in stack.resources] for stack in (first, same, other)]
    assert names[0] == names[1]
    assert [a == b for a, b in zip(names[0], names[2], strict=True)] == [
        False,
        False,
        True,
        True,
        True,
        True,
        True,
    ]
    assert all(len(name) <= 63 for name in names[0][:2])
    wider = scaled_stack(WEIGHTS, autoscale=Autoscale(2, 9, 3))
    assert wider.resources[1].name == first.resources[1].name, (
        "scaling limits do not change the endpoint config"
    )
    new = scaled_stack((WEIGHTS[0], Artifact("d", "ffffffffffff")))
    assert new.uploads[0].uri == first.uploads[0].uri, (
        "a new drafter does not change the prefix of the target"
    )
    assert new.uploads[1].uri != first.uploads[1].uri


def test_the_cloudformation_template() -> None:
    """The template is valid for cfn-lint, which uses the resource schemas of AWS."""
    stack = build_stack(
        endpoint_settings(autoscale=Autoscale(1, 4, 8)), deployment(), *WEIGHTS, channel=False
    )
    template = cloudformation_template(stack)
    assert [str(problem) for problem in lint(json.dumps(template), regions=[REGION])] == []
    container = template["Resources"]["Model"]["Properties"]["PrimaryContainer"]
    uri = container["ModelDataSource"]["S3DataSource"]["S3Uri"]
    variables = container["Environment"]
    assert all(upload.uri.startswith(uri) for upload in stack.uploads)
    assert variables["SM_VLLM_MODEL"] == "/opt/ml/model/target"
    assert (
        json.loads(variables["SM_VLLM_SPECULATIVE_CONFIG"])["model"]
        == "/opt/ml/model/eagle-ba9876543210"
    )
    container["AdditionalModelDataSources"] = []
    assert lint(json.dumps(template), regions=[REGION]), (
        "CloudFormation supports channels now: use them"
    )


def test_the_terraform_config() -> None:
    config = terraform_config(scaled_stack(WEIGHTS, variables={"A": "${b}"}, public=frozenset("A")))
    assert set(config["resource"]) == set(SCHEMA) - {"//"}
    for kind, blocks in config["resource"].items():
        for label, block in blocks.items():
            check_block(block, SCHEMA[kind], f"{kind}.{label}")
    model = config["resource"]["aws_sagemaker_model"]["peagle"]["primary_container"]
    assert model["additional_model_data_source"][0]["channel_name"] == "eagle"
    assert model["environment"]["A"] == "$${b}"
    alarm = config["resource"]["aws_cloudwatch_metric_alarm"]["errors"]
    assert alarm["dimensions"] == {"EndpointName": NAME, "VariantName": "AllTraffic"}


SECRETS = {
    "HF_TOKEN": "hf_secret",
    "SM_VLLM_API_KEY": "sk-secret",
    "OPENAI_APIKEY": "sk-secret",
    "DB_PASSWD": "secret",
    "AWS_SESSION_TOKEN_X": "secret",
    "SM_VLLM_HF_OVERRIDES": "secret",
}


def printed_stacks(stack: Stack) -> list[str]:
    makers = (dry_run_steps, cloudformation_template, terraform_config)
    return [json.dumps(make(stack)) for make in makers]


def test_secrets_are_not_printed() -> None:
    """Only values of public variables are printed."""
    public = {"SM_VLLM_MAX_NUM_BATCHED_TOKENS": "4096", "MY_SETTING": "blue"}
    settings = endpoint_settings(variables=SECRETS | public, public=frozenset({"MY_SETTING"}))
    stack = build_stack(settings, deployment(), *WEIGHTS, channel=False)
    container = stack.resources[0].create.parameters["PrimaryContainer"]
    assert container["Environment"].items() >= SECRETS.items(), "the values are sent to AWS"
    for printed in printed_stacks(stack):
        assert "secret" not in printed
        assert '"SM_VLLM_MAX_NUM_BATCHED_TOKENS": "4096"' in printed and '"blue"' in printed
    assert [
        str(problem)
        for problem in lint(json.dumps(cloudformation_template(stack)), regions=[REGION])
    ] == []
    config = terraform_config(stack)
    assert set(config["variable"]) == {name.lower() for name in SECRETS}
    environment = config["resource"]["aws_sagemaker_model"]["peagle"]["primary_container"][
        "environment"
    ]
    assert environment["HF_TOKEN"] == "${var.hf_token}"


def test_a_declared_secret_is_never_printed() -> None:
    """This holds even if the name is in the list of public names."""
    name = "SM_VLLM_MAX_NUM_BATCHED_TOKENS"
    given = variable_settings([], [], [])
    assert given["secret"] == frozenset()
    settings = endpoint_settings(variables={name: "47110815"}, secret=frozenset({name}))
    stack = build_stack(settings, deployment(), *WEIGHTS, channel=False)
    assert not any("47110815" in printed for printed in printed_stacks(stack))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("API_TOKEN", "47110815")
        assert variable_settings([], ["API_TOKEN"], [])["secret"] == frozenset({"API_TOKEN"})
        with pytest.raises(UserError, match="by --secret and by --public"):
            variable_settings([], ["API_TOKEN"], ["API_TOKEN"])


def test_every_secret_has_its_own_parameter() -> None:
    """Names may collide with resources, with other secrets or with reserved words of Terraform."""
    names = ("MODEL", "model", "Model", "A_1", "A1", "COUNT", "VERSION")
    settings = endpoint_settings(variables=dict.fromkeys(names, "secret"))
    stack = build_stack(settings, deployment(), *WEIGHTS, channel=False)
    template = cloudformation_template(stack)
    assert len(template["Parameters"]) == len(names)
    assert not template["Parameters"].keys() & template["Resources"].keys()
    environment = template["Resources"]["Model"]["Properties"]["PrimaryContainer"]["Environment"]
    assert {environment[name]["Ref"] for name in names} == set(template["Parameters"])
    variables = terraform_config(stack)["variable"]
    assert len(variables) == len(names) and not {"count", "version"} & set(variables)


@pytest.mark.parametrize("name", shipped_pairs())
def test_options_of_the_catalog_are_public(name: str) -> None:
    variables = container_environment(deployment(flags=find_pair(name).production.flags))
    assert secret_names(variables, public=()) == frozenset()


def test_public_names_exist() -> None:
    with pytest.raises(UserError, match="`public` has 'MY_SETING'"):
        scaled_stack(WEIGHTS, variables={"MY_SETTING": "1"}, public=frozenset({"MY_SETING"}))


def test_secrets_come_from_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_APIKEY", "from the environment")
    (tmp_path / "password").write_text("from a file\n")
    words = ["OPENAI_APIKEY", f"DB_PASSWD=@{tmp_path}/password"]
    assert container_variables(["A=1"], words) == {
        "A": "1",
        "OPENAI_APIKEY": "from the environment",
        "DB_PASSWD": "from a file",
    }
    secrets = [option for word in words for option in ("--secret", word)]
    result = run("gpt-oss-20b", *ASKED, "--dry-run", "--env", "MINE=4711", *secrets)
    assert not re.search("from the environment|from a file|4711", result.output)
    assert all(f'"{name}": "***"' in result.stdout for name in ("OPENAI_APIKEY", "DB_PASSWD"))
    result = run("gpt-oss-20b", *ASKED, "--dry-run", "--env", "MINE=4711", "--public", "MINE")
    assert '"MINE": "4711"' in result.stdout


def check_block(block: dict[str, Any], schema: dict[str, Any], where: str) -> None:
    """Every argument is known, and no required one is missing."""
    meta = {"lifecycle", "depends_on"}
    for name, value in block.items():
        assert name in schema or name in meta, f"{where}.{name}"
        if name in schema and isinstance(schema[name], list):
            for item in value if isinstance(value, list) else [value]:
                check_block(item, schema[name][1], f"{where}.{name}")
    needed = [
        name for name, rule in schema.items() if (rule[0] if isinstance(rule, list) else rule)
    ]
    assert [name for name in needed if name not in block] == [], where


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a_b"}, "`name`"),
        ({"name": "a" * 53}, "at most 52"),
        ({"name": "-a"}, "`name`"),
        ({"role": "SageMaker"}, "arn:aws:iam::123456789012:role/NAME"),
        ({"role": "arn:aws:iam::12:role/x"}, "`role`"),
        ({"role": "arn:aws:iam::123456789012:user/x"}, "`role`"),
        ({"notify": "pager"}, "arn:aws:sns:us-west-2"),
        ({"region": "west"}, "us-west-2"),
        ({"instance": "g5.xlarge"}, "ml.g7e.2xlarge"),
        ({"bucket": "weights"}, "s3://BUCKET/peagle/"),
        ({"bucket": "s3://W/x"}, "s3://BUCKET/peagle/"),
        ({"bucket": "s3://weights//x"}, "s3://BUCKET/peagle/"),
        ({"count": 0}, "`count`"),
        ({"count": 5, "autoscale": Autoscale(1, 4, 8)}, "MAX"),
        ({"startup_seconds": 30}, "60 to 3600"),
        ({"from_hub": True}, "`from_hub` needs the network"),
        (
            {"role": ROLE.replace("arn:aws:", "arn:aws-cn:"), "region": "cn-north-1"},
            "give the URI with `image`",
        ),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        endpoint_settings(**changes)


@pytest.mark.parametrize("given", [(0, 4, 8), (3, 2, 8), (1, 2, 0), (1, 2, float("inf"))])
def test_invalid_scaling_is_refused(given: tuple[int, int, float]) -> None:
    with pytest.raises(UserError, match="`autoscale`"):
        Autoscale(*given)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"A": "ü" * 513}, "1026 bytes"),
        ({f"A{i}": "x" for i in range(101)}, "101 entries"),
        ({f"A{i}": "x" * 1000 for i in range(33)}, "together"),
        ({"A-B": "x"}, "name"),
        ({"A": "{\n}"}, "one line"),
    ],
)
def test_invalid_environments_are_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_environment(variables)


def test_trees_need_an_image_with_the_native_engine() -> None:
    given = {
        "SM_VLLM_SPECULATIVE_CONFIG": '{"parallel_drafting_spec": {"num_branches": 2, "depth": 7}}'
    }
    with pytest.raises(UserError, match="use parallel_drafting"):
        build_stack(endpoint_settings(variables=given), deployment(), *WEIGHTS)
    image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/peagle:1"
    assert build_stack(
        endpoint_settings(variables=given, image=image), deployment(), *WEIGHTS
    ).resources


def test_environments_at_the_limits_are_accepted() -> None:
    check_environment({f"A{i:02}": "x" * 1024 for i in range(31)})
    check_environment({f"A{i}": "x" for i in range(100)})
    assert check_environment(container_environment(deployment())) is None


def test_a_name_of_maximum_length_is_accepted() -> None:
    names = [resource.name for resource in scaled_stack(WEIGHTS, name="a" * 52).resources[:2]]
    assert [len(name) for name in names] == [63, 63]


def test_memory_of_an_instance_is_checked() -> None:
    large = deployment(weights_gb=62.0, need_gb=70.0)
    assert check_memory("ml.g7e.2xlarge", large) == []
    message = "needs 70.0 GB, but vLLM gets 21.6 GB of the GPUs of ml.g6.xlarge: use ml.p5.4xlarge"
    with pytest.raises(UserError, match=message):
        check_memory("ml.g6.xlarge", large)
    assert check_memory("ml.g6.12xlarge", deployment(need_gb=70.0, gpus=4)) == []
    with pytest.raises(UserError, match="shorter `context`"):
        check_memory("ml.g6.12xlarge", deployment(need_gb=70.0, gpus=2))
    with pytest.raises(UserError, match="has 4"):
        check_memory("ml.g6.12xlarge", deployment(gpus=8))
    assert "not in the table" in check_memory("ml.g9.xlarge", large)[0]
    assert "unknown" in check_memory("ml.g6.xlarge", deployment())[0]
    assert smallest_instance(1e6) is None


def test_instance_types_exist_in_sagemaker() -> None:
    assert set(instance_types()) <= set(
        service("sagemaker").shape_for("ProductionVariantInstanceType").enum
    )


def run(*words: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["deploy", "sagemaker", *words])
    assert result.exit_code == code, result.output
    return result


ASKED = ["--role", ROLE, "--region", REGION]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("format", ["json", "cloudformation", "terraform"])
def test_the_dry_run_needs_no_connection(
    pair: str, format: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The dry run uses no credentials and no connection, and downloads nothing."""
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)

    def refused(*args: Any) -> None:
        raise AssertionError("the dry run wants to connect")

    monkeypatch.setattr(socket.socket, "connect", refused)
    result = run(
        pair,
        *ASKED,
        "--instance",
        "ml.p5.48xlarge",
        "--gpus",
        "1",
        "--context",
        "2048",
        "--autoscale",
        "1",
        "2",
        "4",
        "--dry-run",
        "--format",
        format,
    )
    printed = json.loads(result.stdout)
    if format == "json":
        for step in printed:
            if "operation" in step:
                check_call(Call(step["service"], step["operation"], step["parameters"]))
        assert [step.get("upload") for step in printed[:2]] == ["target", "drafter"]
    elif format == "cloudformation":
        assert len(printed["Resources"]) == 7
    else:
        assert set(printed["resource"]) == set(SCHEMA) - {"//"}
    assert not list(tmp_path.iterdir()), "something was downloaded"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt-oss-20b", "--format", "yml"], "use json, cloudformation, terraform"),
        (["gpt-oss-120b"], "--instance is missing"),
        (["gpt-oss-20b", "--instance", "ml.g4dn.xlarge", "--context", "131072"], "needs 20.2 GB"),
        (["gpt-oss-20b", "-k", "11"], "depth 10"),
        (["gpt-oss-20b", "--image", "1.dkr.ecr/vllm:0.17.0-gpu"], "vLLM 0.18"),
        (["smollm2-135m", "--from-hub"], "omit --from-hub"),
        (["qwen2.5-coder-1.5b"], "no trained drafter"),
        (["gpt-oss-20b", "--env", "HF_TOKEN"], "NAME=VALUE.*--secret NAME"),
        (["gpt-oss-20b", "--secret", "NOT_EXPORTED"], "NOT_EXPORTED: the environment has no"),
        (["gpt-oss-20b", "--secret", "A=visible"], "--secret A: .* use NAME or NAME=@FILE"),
        (["gpt-oss-20b", "--secret", "A=@no-such-file"], "--secret A: cannot read no-such-file"),
        (["gpt-oss-20b", "--env", "PATH=1", "--secret", "PATH"], "PATH is given by --env and"),
        (["gpt-oss-20b", "--public", "A"], "--public has 'A'"),
        (["gpt-oss-20b", "--env", f"A={'x' * 1025}"], "1024"),
    ],
)
def test_mistakes_on_the_command_line(words: list[str], message: str) -> None:
    result = run(*words, *ASKED, "--dry-run", code=2)
    assert re.search(message, " ".join(result.stderr.split())), result.stderr
    assert result.stdout == ""


def test_the_hash_of_a_folder_depends_on_its_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    before = artifact.hash_folder(tmp_path)
    (tmp_path / "peagle.json").write_text("a receipt")
    assert artifact.hash_folder(tmp_path) == before
    (tmp_path / "a").write_text("2")
    assert artifact.hash_folder(tmp_path) != before
