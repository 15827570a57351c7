"""Deletion of an endpoint and of everything that belongs to it.

That includes the configs and models that earlier updates left.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from peagle.deploy.sagemaker.operate.clients import Clients, is_not_found
from peagle.deploy.sagemaker.operate.wait import (
    Sleep,
    StatusCallback,
    describe_endpoint,
    wait_until_deleted,
)
from peagle.deploy.sagemaker.plan.limits import DIGEST_LENGTH
from peagle.deploy.sagemaker.resources.alarms import alarm_names
from peagle.deploy.sagemaker.resources.calls import Call
from peagle.deploy.sagemaker.resources.scaling import SERVICE as SCALING_SERVICE
from peagle.deploy.sagemaker.resources.scaling import scalable_dimension

LIST_OPERATIONS = {"EndpointConfig": "list_endpoint_configs", "Model": "list_models"}


@dataclass(frozen=True, slots=True)
class Deletion:
    description: str
    call: Call


def find_deletions(clients: Clients, endpoint: str) -> list[Deletion]:
    """Everything to delete, in an order that AWS accepts."""
    deletions = [*scaling_deletions(clients, endpoint)]
    if describe_endpoint(clients, endpoint):
        call = Call("sagemaker", "DeleteEndpoint", {"EndpointName": endpoint})
        deletions.append(Deletion(f"endpoint {endpoint}", call))
    for noun in ("EndpointConfig", "Model"):
        for name in list_names(clients, noun, endpoint):
            if is_owned_by(name, endpoint):
                call = Call("sagemaker", f"Delete{noun}", {f"{noun}Name": name})
                deletions.append(Deletion(f"{noun} {name}", call))
    query = {"AlarmNames": [*alarm_names(endpoint)]}
    response = clients.call(Call("cloudwatch", "DescribeAlarms", query))
    for alarm in response["MetricAlarms"]:
        name = alarm["AlarmName"]
        call = Call("cloudwatch", "DeleteAlarms", {"AlarmNames": [name]})
        deletions.append(Deletion(f"alarm {name}", call))
    return deletions


def is_owned_by(name: str, endpoint: str) -> bool:
    """Whether `name` is the name of a model or config of this endpoint."""
    return bool(re.fullmatch(rf"{re.escape(endpoint)}-[0-9a-f]{{{DIGEST_LENGTH}}}", name))


def scaling_deletions(clients: Clients, endpoint: str) -> Iterator[Deletion]:
    dimension = scalable_dimension(endpoint)
    namespace = {"ServiceNamespace": "sagemaker"}
    policy_query = namespace | {"ResourceId": dimension["ResourceId"]}
    response = clients.call(Call(SCALING_SERVICE, "DescribeScalingPolicies", policy_query))
    for policy in response["ScalingPolicies"]:
        name = policy["PolicyName"]
        call = Call(SCALING_SERVICE, "DeleteScalingPolicy", {"PolicyName": name} | dimension)
        yield Deletion(f"scaling policy {name}", call)
    target_query = {**namespace, "ResourceIds": [dimension["ResourceId"]]}
    response = clients.call(Call(SCALING_SERVICE, "DescribeScalableTargets", target_query))
    if response["ScalableTargets"]:
        call = Call(SCALING_SERVICE, "DeregisterScalableTarget", dimension)
        yield Deletion(f"scalable target of {endpoint}", call)


def list_names(clients: Clients, noun: str, substring: str = "") -> Iterator[str]:
    """The names of all models or endpoint configs that contain `substring`."""
    query = {"NameContains": substring} if substring else {}
    for page in clients["sagemaker"].get_paginator(LIST_OPERATIONS[noun]).paginate(**query):
        yield from (entry[f"{noun}Name"] for entry in page[f"{noun}s"])


def delete(
    clients: Clients,
    endpoint: str,
    deletions: list[Deletion],
    on_status: StatusCallback,
    sleep: Sleep = time.sleep,
) -> None:
    def on_endpoint_status(status: str) -> None:
        on_status(f"endpoint {endpoint}: {status}")

    for deletion in deletions:
        on_status(deletion.description)
        clients.call(deletion.call)
        if deletion.call.operation == "DeleteEndpoint":
            wait_until_deleted(clients, endpoint, on_endpoint_status, sleep)


def exclusive_prefixes(clients: Clients, endpoint: str) -> list[str]:
    """S3 prefixes that the endpoint's models read and no other model of this region does."""
    own: dict[str, None] = {}  # dicts instead of sets: they keep the order
    others: dict[str, None] = {}
    for model in list_names(clients, "Model"):
        for uri in model_prefixes(clients, model):
            (own if is_owned_by(model, endpoint) else others)[uri] = None
    return [
        uri
        for uri in own
        if not any(other.startswith(uri) or uri.startswith(other) for other in others)
    ]


def model_prefixes(clients: Clients, model: str) -> Iterator[str]:
    response = clients.read(Call("sagemaker", "DescribeModel", {"ModelName": model})) or {}
    container = response.get("PrimaryContainer", {})
    sources = container.get("AdditionalModelDataSources", [])
    for source in [container.get("ModelDataSource", {}), *sources]:
        if uri := source.get("S3DataSource", {}).get("S3Uri"):
            yield uri


def delete_prefix(client: Any, uri: str) -> int:
    """Delete all objects below an S3 prefix; return their number."""
    from botocore.exceptions import ClientError

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    count = 0
    try:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            if keys := [{"Key": entry["Key"]} for entry in page.get("Contents", [])]:
                client.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
                count += len(keys)
    except ClientError as error:
        if not is_not_found(error):
            raise
    return count
