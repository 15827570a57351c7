"""A stack as a CloudFormation template. CloudFormation knows no channels: make the stack with `channel=False`."""

from typing import Any

from peagle.deploy.sagemaker.output.secrets import secrets, veiled
from peagle.deploy.sagemaker.resources.calls import Parameters, Resource
from peagle.deploy.sagemaker.resources.stack import Stack

TYPES = {
    "model": "AWS::SageMaker::Model",
    "endpoint config": "AWS::SageMaker::EndpointConfig",
    "endpoint": "AWS::SageMaker::Endpoint",
    "alarm": "AWS::CloudWatch::Alarm",
    "scalable target": "AWS::ApplicationAutoScaling::ScalableTarget",
    "scaling policy": "AWS::ApplicationAutoScaling::ScalingPolicy",
}


def cloudformation(stack: Stack) -> dict[str, Any]:
    hidden = {
        parameter(name): {"Type": "String", "NoEcho": True} for name in secrets(stack.resources[0])
    }
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"peagle: endpoint {stack.name}. The weights are uploaded before: see Metadata.",
        "Metadata": {"Uploads": {upload.uri: upload.artifact.source for upload in stack.uploads}},
        **({"Parameters": hidden} if hidden else {}),
        "Resources": {
            logical(resource): described(resource, stack) for resource in stack.resources
        },
        "Outputs": {"Endpoint": {"Value": stack.name}, "LogGroup": {"Value": stack.logs}},
    }


def logical(resource: Resource) -> str:
    """A name within the template: Model, AlarmErrors, ScalingPolicy."""
    word = resource.name.rsplit("-", 1)[-1] if resource.kind == "alarm" else ""
    return "".join(part.capitalize() for part in [*resource.kind.split(), word])


def described(resource: Resource, stack: Stack) -> dict[str, Any]:
    properties = dict(resource.create.parameters)
    told: dict[str, Any] = {"Type": TYPES[resource.kind], "Properties": properties}
    if resource.kind == "model":
        told["Properties"] = veiled(resource, lambda name: {"Ref": parameter(name)})
    if resource.kind == "endpoint config":
        told["Properties"] = properties | {
            "ProductionVariants": with_model(properties["ProductionVariants"])
        }
    if resource.kind == "endpoint":
        assert resource.change is not None
        change = resource.change.parameters
        kept = {key: change[key] for key in ("DeploymentConfig", "RetainAllVariantProperties")}
        told["Properties"] = (
            properties
            | kept
            | {"EndpointConfigName": attribute("EndpointConfig", "EndpointConfigName")}
        )
        told["DependsOn"] = [logical(one) for one in stack.resources if one.kind == "alarm"]
    if resource.kind == "scalable target":
        told["DependsOn"] = ["Endpoint"]
    if resource.kind == "scaling policy":
        told["DependsOn"] = ["ScalableTarget"]
    return told


def parameter(variable: str) -> str:
    """HF_TOKEN -> HfToken"""
    return "".join(word.capitalize() for word in variable.split("_"))


def with_model(variants: list[Parameters]) -> list[Parameters]:
    return [variant | {"ModelName": attribute("Model", "ModelName")} for variant in variants]


def attribute(resource: str, name: str) -> dict[str, list[str]]:
    """By reference, so that things are made in the right order."""
    return {"Fn::GetAtt": [resource, name]}
