"""Status of an endpoint: its instances, models, alarms and autoscaling."""

from typing import Any

from peagle.deploy.sagemaker.operate.clients import Clients
from peagle.deploy.sagemaker.operate.wait import describe_endpoint
from peagle.deploy.sagemaker.resources.alarms import alarm_names
from peagle.deploy.sagemaker.resources.calls import Call
from peagle.deploy.sagemaker.resources.scaling import SERVICE as SCALING_SERVICE
from peagle.deploy.sagemaker.resources.scaling import scalable_dimension
from peagle.deploy.sagemaker.resources.stack import LOG_GROUP_PREFIX
from peagle.errors import UserError


def endpoint_status(clients: Clients, name: str) -> dict[str, Any]:
    """The JSON object that `peagle sagemaker status` prints."""
    endpoint = describe_endpoint(clients, name)
    if endpoint is None:
        raise UserError(
            f"there is no endpoint {name!r} in {clients.session.region_name}:"
            " check `region` and the name"
        )
    variants = configured_variants(clients, endpoint["EndpointConfigName"])
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
        "models": [model_summary(clients, variant) for variant in variants],
        "alarms": alarm_states(clients, name),
        "autoscale": scaling_limits(clients, name),
        "log_group": LOG_GROUP_PREFIX + name,
    }


def configured_variants(clients: Clients, config: str) -> list[dict[str, Any]]:
    call = Call("sagemaker", "DescribeEndpointConfig", {"EndpointConfigName": config})
    response = clients.read(call)
    return response["ProductionVariants"] if response else []


def model_summary(clients: Clients, variant: dict[str, Any]) -> dict[str, Any]:
    name = variant["ModelName"]
    response = clients.read(Call("sagemaker", "DescribeModel", {"ModelName": name})) or {}
    container = response.get("PrimaryContainer", {})
    variables = container.get("Environment", {})
    return {
        "model": name,
        "instance": variant.get("InstanceType"),
        "image": container.get("Image"),
        "speculative_config": variables.get("SM_VLLM_SPECULATIVE_CONFIG"),
    }


def alarm_states(clients: Clients, name: str) -> dict[str, str]:
    query = {"AlarmNames": [*alarm_names(name)]}
    response = clients.call(Call("cloudwatch", "DescribeAlarms", query))
    return {alarm["AlarmName"]: alarm["StateValue"] for alarm in response["MetricAlarms"]}


def scaling_limits(clients: Clients, name: str) -> dict[str, int] | None:
    resource_id = scalable_dimension(name)["ResourceId"]
    query = {"ServiceNamespace": "sagemaker", "ResourceIds": [resource_id]}
    call = Call(SCALING_SERVICE, "DescribeScalableTargets", query)
    target = clients.read(call, "ScalableTargets[0]")
    return {"min": target["MinCapacity"], "max": target["MaxCapacity"]} if target else None
