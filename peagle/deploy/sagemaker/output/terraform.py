"""A stack as Terraform's JSON syntax (main.tf.json). hashicorp/aws spells AWS's names in snake case, lists in singular
and maps of dimensions as maps."""

import re
from typing import Any

from peagle.deploy.sagemaker.output.secrets import secrets
from peagle.deploy.sagemaker.resources.calls import Parameters, Resource
from peagle.deploy.sagemaker.resources.stack import Stack

PROVIDER = {"source": "hashicorp/aws", "version": ">= 6.25, < 7"}
TYPES = {
    "model": "aws_sagemaker_model",
    "endpoint config": "aws_sagemaker_endpoint_configuration",
    "endpoint": "aws_sagemaker_endpoint",
    "alarm": "aws_cloudwatch_metric_alarm",
    "scalable target": "aws_appautoscaling_target",
    "scaling policy": "aws_appautoscaling_policy",
}
NAMES = {
    "model_name": "name",
    "endpoint_config_name": "name",
    "endpoint_name": "name",
    "policy_name": "name",
}
SPELT = {"additional_model_data_sources": "additional_model_data_source"}
AS_THEY_ARE = ("environment", "tags", "dimensions")  # maps whose keys are the user's


def terraform(stack: Stack) -> dict[str, Any]:
    resources: dict[str, dict[str, Any]] = {}
    for resource in stack.resources:
        resources.setdefault(TYPES[resource.kind], {})[label(resource)] = arguments(resource, stack)
    hidden = {
        name.lower(): {"type": "string", "sensitive": True} for name in secrets(stack.resources[0])
    }
    weights = {upload.uri: upload.artifact.source for upload in stack.uploads}
    return {
        "//": {"weights, uploaded before": weights},
        "terraform": {"required_version": ">= 1.5", "required_providers": {"aws": PROVIDER}},
        "provider": {"aws": {"region": stack.region}},
        **({"variable": hidden} if hidden else {}),
        "resource": resources,
        "output": {
            "endpoint": {"value": "${aws_sagemaker_endpoint.peagle.name}"},
            "log_group": {"value": stack.logs},
        },
    }


def label(resource: Resource) -> str:
    return resource.name.rsplit("-", 1)[-1] if resource.kind == "alarm" else "peagle"


def arguments(resource: Resource, stack: Stack) -> dict[str, Any]:
    given = block(resource.create.parameters)
    if resource.kind in ("model", "endpoint config", "endpoint", "scaling policy"):
        given = {
            NAMES.get(key, key) if key == own_name(resource) else key: value
            for key, value in given.items()
        }
    if resource.kind == "endpoint config":
        given["production_variants"][0]["model_name"] = "${aws_sagemaker_model.peagle.name}"
        given["lifecycle"] = {"create_before_destroy": True}
    if resource.kind == "model":
        given["primary_container"]["environment"] |= {
            name: f"${{var.{name.lower()}}}" for name in secrets(resource)
        }
        given["lifecycle"] = {"create_before_destroy": True}
    if resource.kind == "endpoint":
        assert resource.change is not None
        given["endpoint_config_name"] = "${aws_sagemaker_endpoint_configuration.peagle.name}"
        given["deployment_config"] = block(resource.change.parameters["DeploymentConfig"])
        given["depends_on"] = [
            f"aws_cloudwatch_metric_alarm.{label(a)}" for a in stack.resources if a.kind == "alarm"
        ]
    if resource.kind == "scalable target":
        given["depends_on"] = ["aws_sagemaker_endpoint.peagle"]
    if resource.kind == "scaling policy":
        given["depends_on"] = ["aws_appautoscaling_target.peagle"]
    return given


def own_name(resource: Resource) -> str:
    return {
        "model": "model_name",
        "endpoint config": "endpoint_config_name",
        "endpoint": "endpoint_name",
    }.get(resource.kind, "policy_name")


def block(parameters: Parameters) -> dict[str, Any]:
    found = {}
    for key, value in parameters.items():
        name = snake(key)
        found[SPELT.get(name, name)] = argument(name, value)
    return found


def argument(name: str, value: Any) -> Any:
    if name in AS_THEY_ARE:
        return literal(as_map(value) if isinstance(value, list) else value)
    if isinstance(value, dict):
        return block(value)
    if isinstance(value, list):
        return [block(one) if isinstance(one, dict) else literal(one) for one in value]
    return literal(value)


def as_map(pairs: list[dict[str, str]]) -> dict[str, str]:
    """[{"Key" or "Name": a, "Value": b}] -> {a: b}"""
    return {pair.get("Key", pair.get("Name", "")): pair["Value"] for pair in pairs}


def literal(value: Any) -> Any:
    """Terraform reads ${ and %{ in texts as its own."""
    if isinstance(value, dict):
        return {key: literal(one) for key, one in value.items()}
    return re.sub(r"([$%])\{", r"\1\1{", value) if isinstance(value, str) else value


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
