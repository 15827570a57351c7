"""Where an endpoint stands: itself, what it runs, its alarms, its scaling."""

from typing import Any

from peagle.deploy.sagemaker.operate.clients import Clients
from peagle.deploy.sagemaker.operate.wait import describe
from peagle.deploy.sagemaker.resources.alarms import alarm_names
from peagle.deploy.sagemaker.resources.calls import Call
from peagle.deploy.sagemaker.resources.scaling import scaled
from peagle.deploy.sagemaker.resources.stack import LOGS
from peagle.errors import UserError


def status(clients: Clients, name: str) -> dict[str, Any]:
    endpoint = describe(clients, name)
    if endpoint is None:
        raise UserError(
            f"there is no endpoint {name!r} in {clients.session.region_name}: check --region and the name"
        )
    return {
        "endpoint": name,
        "region": clients.session.region_name,
        "status": endpoint["EndpointStatus"],
        "failure_reason": endpoint.get("FailureReason"),
        "config": endpoint["EndpointConfigName"],
        "changed": str(endpoint["LastModifiedTime"]),
        "instances": {
            variant["VariantName"]: {
                "now": variant.get("CurrentInstanceCount"),
                "wanted": variant.get("DesiredInstanceCount"),
            }
            for variant in endpoint.get("ProductionVariants", [])
        },
        "models": [
            running(clients, variant)
            for variant in variants(clients, endpoint["EndpointConfigName"])
        ],
        "alarms": alarms(clients, name),
        "autoscale": scaling(clients, name),
        "log_group": LOGS + name,
    }


def variants(clients: Clients, config: str) -> list[dict[str, Any]]:
    found = clients.look(
        Call("sagemaker", "DescribeEndpointConfig", {"EndpointConfigName": config})
    )
    return found["ProductionVariants"] if found else []


def running(clients: Clients, variant: dict[str, Any]) -> dict[str, Any]:
    found = (
        clients.look(Call("sagemaker", "DescribeModel", {"ModelName": variant["ModelName"]})) or {}
    )
    container = found.get("PrimaryContainer", {})
    speculative = container.get("Environment", {}).get("SM_VLLM_SPECULATIVE_CONFIG")
    told = {"model": variant["ModelName"], "instance": variant.get("InstanceType")}
    return told | {"image": container.get("Image"), "speculative_config": speculative}


def alarms(clients: Clients, name: str) -> dict[str, str]:
    told = clients.call(Call("cloudwatch", "DescribeAlarms", {"AlarmNames": [*alarm_names(name)]}))
    return {alarm["AlarmName"]: alarm["StateValue"] for alarm in told["MetricAlarms"]}


def scaling(clients: Clients, name: str) -> dict[str, int] | None:
    dimension = scaled(name)
    of = {"ServiceNamespace": "sagemaker", "ResourceIds": [dimension["ResourceId"]]}
    found = clients.look(
        Call("application-autoscaling", "DescribeScalableTargets", of), "ScalableTargets[0]"
    )
    return {"min": found["MinCapacity"], "max": found["MaxCapacity"]} if found else None
