"""Model, endpoint config and endpoint, as resources.

The names of models and configs end in a digest of their parameters: the same settings give the
same names, and other settings never overwrite what is in use.
"""

import hashlib
import json
from dataclasses import replace

from peagle.deploy.sagemaker.plan.choices import EndpointSettings
from peagle.deploy.sagemaker.plan.limits import DIGEST_LENGTH
from peagle.deploy.sagemaker.resources.calls import VARIANT, Call, Parameters, Resource

BAKE_SECONDS = 300  # the alarms watch a new fleet for this long before the old one is terminated
TERMINATION_WAIT_SECONDS = 60


def parameter_digest(parameters: Parameters) -> str:
    encoded = json.dumps(parameters, sort_keys=True).encode()
    return hashlib.sha256(encoded).hexdigest()[:DIGEST_LENGTH]


def model_resource(
    settings: EndpointSettings, container: Parameters, tags: list[Parameters]
) -> Resource:
    parameters = {
        "PrimaryContainer": container,
        "ExecutionRoleArn": settings.role,
        "EnableNetworkIsolation": settings.isolated,
        "Tags": tags,
    }
    name = f"{settings.name}-{parameter_digest(parameters)}"
    return sagemaker_resource("model", "Model", name, {"ModelName": name} | parameters)


def config_resource(settings: EndpointSettings, model: str, tags: list[Parameters]) -> Resource:
    variant = {
        "VariantName": VARIANT,
        "ModelName": model,
        "InstanceType": settings.instance,
        "InitialInstanceCount": settings.count,
        "ModelDataDownloadTimeoutInSeconds": settings.startup_seconds,
        "ContainerStartupHealthCheckTimeoutInSeconds": settings.startup_seconds,
        "RoutingConfig": {"RoutingStrategy": "LEAST_OUTSTANDING_REQUESTS"},
    }
    if settings.ami:
        variant["InferenceAmiVersion"] = settings.ami
    parameters = {"ProductionVariants": [variant], "Tags": tags}
    name = f"{settings.name}-{parameter_digest(parameters)}"
    return sagemaker_resource(
        "endpoint config", "EndpointConfig", name, {"EndpointConfigName": name} | parameters
    )


def endpoint_resource(
    settings: EndpointSettings, config: str, alarms: tuple[Resource, ...], tags: list[Parameters]
) -> Resource:
    key = {"EndpointName": settings.name, "EndpointConfigName": config}
    endpoint = sagemaker_resource("endpoint", "Endpoint", settings.name, key | {"Tags": tags})
    changes = {
        # With autoscaling, an update keeps the current number of instances.
        "RetainAllVariantProperties": settings.autoscale is not None,
        "DeploymentConfig": deployment_config(alarms),
    }
    return replace(endpoint, update=Call("sagemaker", "UpdateEndpoint", key | changes))


def deployment_config(alarms: tuple[Resource, ...]) -> Parameters:
    """Blue/green: all traffic moves to a new fleet, and back to the old one if an alarm fires."""
    traffic = {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": BAKE_SECONDS}
    return {
        "BlueGreenUpdatePolicy": {
            "TrafficRoutingConfiguration": traffic,
            "TerminationWaitInSeconds": TERMINATION_WAIT_SECONDS,
        },
        "AutoRollbackConfiguration": {"Alarms": [{"AlarmName": alarm.name} for alarm in alarms]},
    }


def sagemaker_resource(kind: str, noun: str, name: str, parameters: Parameters) -> Resource:
    """A resource whose calls are Create, Describe and Delete of `noun`."""
    key = {f"{noun}Name": name}
    return Resource(
        kind=kind,
        name=name,
        create=Call("sagemaker", f"Create{noun}", parameters),
        read=Call("sagemaker", f"Describe{noun}", key),
        result_path="@",
        delete=Call("sagemaker", f"Delete{noun}", key),
    )
