"""Model, endpoint config and endpoint, as resources.

Names of models and configs end in a digest of what they hold: the same choices give the same names, and other choices
never overwrite what serves.
"""

import hashlib
import json
from dataclasses import replace

from peagle.deploy.sagemaker.plan.choices import Choices
from peagle.deploy.sagemaker.plan.limits import DIGEST
from peagle.deploy.sagemaker.resources.calls import VARIANT, Call, Parameters, Resource

BAKE = 300  # seconds the alarms watch a new fleet before the old one goes


def digest(parameters: Parameters) -> str:
    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:DIGEST]


def model_of(choices: Choices, container: Parameters, tags: list[Parameters]) -> Resource:
    wanted = {
        "PrimaryContainer": container,
        "ExecutionRoleArn": choices.role,
        "EnableNetworkIsolation": choices.isolated,
        "Tags": tags,
    }
    name = f"{choices.name}-{digest(wanted)}"
    return sagemaker("model", "Model", name, {"ModelName": name} | wanted)


def config_of(choices: Choices, model: str, tags: list[Parameters]) -> Resource:
    variant = {
        "VariantName": VARIANT,
        "ModelName": model,
        "InstanceType": choices.instance,
        "InitialInstanceCount": choices.count,
        "ModelDataDownloadTimeoutInSeconds": choices.startup,
        "ContainerStartupHealthCheckTimeoutInSeconds": choices.startup,
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
    }
    if choices.ami:
        variant["InferenceAmiVersion"] = choices.ami
    wanted = {"ProductionVariants": [variant], "Tags": tags}
    name = f"{choices.name}-{digest(wanted)}"
    return sagemaker(
        "endpoint config", "EndpointConfig", name, {"EndpointConfigName": name} | wanted
    )


def endpoint_of(
    choices: Choices, config: str, alarms: tuple[Resource, ...], tags: list[Parameters]
) -> Resource:
    named = {"EndpointName": choices.name, "EndpointConfigName": config}
    made = sagemaker("endpoint", "Endpoint", choices.name, named | {"Tags": tags})
    update = Call(
        "sagemaker",
        "UpdateEndpoint",
        named
        | {
            "RetainAllVariantProperties": choices.autoscale
            is not None,  # as many instances as there are now
            "DeploymentConfig": deployment_config(alarms),
        },
    )
    return replace(made, change=update)


def deployment_config(alarms: tuple[Resource, ...]) -> Parameters:
    """A new fleet beside the old one; all traffic to it; back to the old one if an alarm rings while both are there."""
    traffic = {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": BAKE}
    return {
        "BlueGreenUpdatePolicy": {
            "TrafficRoutingConfiguration": traffic,
            "TerminationWaitInSeconds": 60,
        },
        "AutoRollbackConfiguration": {"Alarms": [{"AlarmName": alarm.name} for alarm in alarms]},
    }


def sagemaker(kind: str, noun: str, name: str, wanted: Parameters) -> Resource:
    named = {f"{noun}Name": name}
    create, read, delete = (
        Call("sagemaker", f"{verb}{noun}", named) for verb in ("Create", "Describe", "Delete")
    )
    return Resource(kind, name, replace(create, parameters=wanted), read, "@", delete)
