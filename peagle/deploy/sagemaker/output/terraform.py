"""A stack in Terraform's JSON syntax (main.tf.json).

The provider hashicorp/aws writes AWS's names in snake case, some lists in the singular, and lists
of keys and values as maps.
"""

import re
from typing import Any

from peagle.deploy.sagemaker.output.secrets import template_names
from peagle.deploy.sagemaker.resources.calls import Parameters, Resource
from peagle.deploy.sagemaker.resources.stack import Stack

PROVIDER = {"source": "hashicorp/aws", "version": ">= 6.25, < 7"}
RESOURCE_TYPES = {
    "model": "aws_sagemaker_model",
    "endpoint config": "aws_sagemaker_endpoint_configuration",
    "endpoint": "aws_sagemaker_endpoint",
    "alarm": "aws_cloudwatch_metric_alarm",
    "scalable target": "aws_appautoscaling_target",
    "scaling policy": "aws_appautoscaling_policy",
}
# Kind -> the argument with the resource's own name, which Terraform calls `name`.
NAME_ARGUMENTS = {
    "model": "model_name",
    "endpoint config": "endpoint_config_name",
    "endpoint": "endpoint_name",
    "scaling policy": "policy_name",
}
RENAMED_ARGUMENTS = {"additional_model_data_sources": "additional_model_data_source"}
USER_KEYED_MAPS = ("environment", "tags", "dimensions")  # their keys are not converted
RESERVED_VARIABLES = (  # names that no variable of Terraform may have
    "count",
    "depends_on",
    "for_each",
    "lifecycle",
    "locals",
    "providers",
    "source",
    "version",
)
REPLACED_BEFORE_DESTROYED = {"create_before_destroy": True}


def terraform_config(stack: Stack) -> dict[str, Any]:
    resources: dict[str, dict[str, Any]] = {}
    for resource in stack.resources:
        labels = resources.setdefault(RESOURCE_TYPES[resource.kind], {})
        labels[resource_label(resource)] = resource_arguments(resource, stack)
    secrets = {
        name: {"type": "string", "sensitive": True} for name in variable_names(stack).values()
    }
    weights = {upload.uri: upload.artifact.source for upload in stack.uploads}
    return {
        "//": {"weights, uploaded before": weights},
        "terraform": {"required_version": ">= 1.5", "required_providers": {"aws": PROVIDER}},
        "provider": {"aws": {"region": stack.region}},
        **({"variable": secrets} if secrets else {}),
        "resource": resources,
        "output": {
            "endpoint": {"value": "${aws_sagemaker_endpoint.peagle.name}"},
            "log_group": {"value": stack.log_group},
        },
    }


def resource_label(resource: Resource) -> str:
    return resource.name.rsplit("-", 1)[-1] if resource.kind == "alarm" else "peagle"


def resource_arguments(resource: Resource, stack: Stack) -> dict[str, Any]:
    name_argument = NAME_ARGUMENTS.get(resource.kind)
    arguments = {
        "name" if key == name_argument else key: value
        for key, value in convert_block(resource.create.parameters).items()
    }
    if resource.kind == "endpoint config":
        arguments["production_variants"][0]["model_name"] = "${aws_sagemaker_model.peagle.name}"
        arguments["lifecycle"] = REPLACED_BEFORE_DESTROYED
    if resource.kind == "model":
        arguments["primary_container"]["environment"] |= {
            name: f"${{var.{variable}}}" for name, variable in variable_names(stack).items()
        }
        arguments["lifecycle"] = REPLACED_BEFORE_DESTROYED
    if resource.kind == "endpoint":
        arguments |= endpoint_arguments(resource, stack)
    if resource.kind == "scalable target":
        arguments["depends_on"] = ["aws_sagemaker_endpoint.peagle"]
    if resource.kind == "scaling policy":
        arguments["depends_on"] = ["aws_appautoscaling_target.peagle"]
    return arguments


def variable_names(stack: Stack) -> dict[str, str]:
    """Secret environment variable -> Terraform's variable."""
    return template_names(stack, str.lower, RESERVED_VARIABLES)


def endpoint_arguments(endpoint: Resource, stack: Stack) -> dict[str, Any]:
    assert endpoint.update is not None
    alarms = [resource for resource in stack.resources if resource.kind == "alarm"]
    return {
        "endpoint_config_name": "${aws_sagemaker_endpoint_configuration.peagle.name}",
        "deployment_config": convert_block(endpoint.update.parameters["DeploymentConfig"]),
        "depends_on": [f"aws_cloudwatch_metric_alarm.{resource_label(alarm)}" for alarm in alarms],
    }


def convert_block(parameters: Parameters) -> dict[str, Any]:
    """Parameters of an AWS call -> arguments of a Terraform block."""
    block = {}
    for key, value in parameters.items():
        name = snake_case(key)
        block[RENAMED_ARGUMENTS.get(name, name)] = convert_value(name, value)
    return block


def convert_value(name: str, value: Any) -> Any:
    if name in USER_KEYED_MAPS:
        return escape_templates(pairs_to_map(value) if isinstance(value, list) else value)
    if isinstance(value, dict):
        return convert_block(value)
    if isinstance(value, list):
        return [
            convert_block(item) if isinstance(item, dict) else escape_templates(item)
            for item in value
        ]
    return escape_templates(value)


def pairs_to_map(pairs: list[dict[str, str]]) -> dict[str, str]:
    """[{"Key" or "Name": a, "Value": b}] -> {a: b}"""
    return {pair.get("Key", pair.get("Name", "")): pair["Value"] for pair in pairs}


def escape_templates(value: Any) -> Any:
    """Escape ${ and %{, which Terraform evaluates in strings."""
    if isinstance(value, dict):
        return {key: escape_templates(item) for key, item in value.items()}
    return re.sub(r"([$%])\{", r"\1\1{", value) if isinstance(value, str) else value


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
