"""A stack as a CloudFormation template.

CloudFormation does not support data channels: build the stack with `channel=False`.
"""

from typing import Any

from peagle.deploy.sagemaker.output.secrets import redacted_parameters, template_names
from peagle.deploy.sagemaker.resources.calls import Parameters, Resource
from peagle.deploy.sagemaker.resources.stack import Stack

RESOURCE_TYPES = {
    "model": "AWS::SageMaker::Model",
    "endpoint config": "AWS::SageMaker::EndpointConfig",
    "endpoint": "AWS::SageMaker::Endpoint",
    "alarm": "AWS::CloudWatch::Alarm",
    "scalable target": "AWS::ApplicationAutoScaling::ScalableTarget",
    "scaling policy": "AWS::ApplicationAutoScaling::ScalingPolicy",
}


def cloudformation_template(stack: Stack) -> dict[str, Any]:
    secrets = {name: {"Type": "String", "NoEcho": True} for name in parameter_names(stack).values()}
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": (
            f"peagle: endpoint {stack.name}. The weights are uploaded before: see Metadata."
        ),
        "Metadata": {"Uploads": {upload.uri: upload.artifact.source for upload in stack.uploads}},
        **({"Parameters": secrets} if secrets else {}),
        "Resources": {
            logical_id(resource): resource_entry(resource, stack) for resource in stack.resources
        },
        "Outputs": {"Endpoint": {"Value": stack.name}, "LogGroup": {"Value": stack.log_group}},
    }


def logical_id(resource: Resource) -> str:
    """The resource's name in the template: Model, AlarmErrors, ScalingPolicy."""
    suffix = resource.name.rsplit("-", 1)[-1] if resource.kind == "alarm" else ""
    return "".join(part.capitalize() for part in [*resource.kind.split(), suffix])


def resource_entry(resource: Resource, stack: Stack) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "Type": RESOURCE_TYPES[resource.kind],
        "Properties": resource_properties(resource, stack),
    }
    if resource.kind == "endpoint":
        entry["DependsOn"] = [logical_id(other) for other in stack.resources if is_alarm(other)]
    if resource.kind == "scalable target":
        entry["DependsOn"] = ["Endpoint"]
    if resource.kind == "scaling policy":
        entry["DependsOn"] = ["ScalableTarget"]
    return entry


def resource_properties(resource: Resource, stack: Stack) -> Parameters:
    """The parameters that create the resource, with references to other resources."""
    properties = dict(resource.create.parameters)
    if resource.kind == "model":
        names = parameter_names(stack)
        return redacted_parameters(resource, stack, lambda name: {"Ref": names[name]})
    if resource.kind == "endpoint config":
        model = {"ModelName": get_attribute("Model", "ModelName")}
        variants = [variant | model for variant in properties["ProductionVariants"]]
        return properties | {"ProductionVariants": variants}
    if resource.kind == "endpoint":
        assert resource.update is not None
        update = resource.update.parameters
        return properties | {
            "DeploymentConfig": update["DeploymentConfig"],
            "RetainAllVariantProperties": update["RetainAllVariantProperties"],
            "EndpointConfigName": get_attribute("EndpointConfig", "EndpointConfigName"),
        }
    return properties


def is_alarm(resource: Resource) -> bool:
    return resource.kind == "alarm"


def parameter_names(stack: Stack) -> dict[str, str]:
    """Secret variable -> parameter. Parameters and resources share their names."""
    resources = [logical_id(resource) for resource in stack.resources]
    return template_names(stack, parameter_name, resources)


def parameter_name(variable: str) -> str:
    """HF_TOKEN -> HfToken"""
    return "".join(word.capitalize() for word in variable.split("_"))


def get_attribute(resource: str, name: str) -> dict[str, list[str]]:
    """A reference, from which CloudFormation derives the order of creation."""
    return {"Fn::GetAtt": [resource, name]}
