"""An endpoint and all that belongs to it, gone: also the configs and models that earlier updates left."""

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from peagle.deploy.sagemaker.operate.clients import Clients, absent
from peagle.deploy.sagemaker.operate.wait import Tell, until_gone
from peagle.deploy.sagemaker.plan.limits import DIGEST
from peagle.deploy.sagemaker.resources.alarms import alarm_names
from peagle.deploy.sagemaker.resources.calls import Call
from peagle.deploy.sagemaker.resources.scaling import scaled


def belongings(clients: Clients, name: str) -> list[tuple[str, Call]]:
    """In the order in which they can go."""
    found = [*scaling(clients, name)]
    if clients.look(Call("sagemaker", "DescribeEndpoint", {"EndpointName": name})):
        found.append(
            (f"endpoint {name}", Call("sagemaker", "DeleteEndpoint", {"EndpointName": name}))
        )
    for noun in ("EndpointConfig", "Model"):
        for one in names(clients, noun, name):
            if belongs(one, name):
                found.append(
                    (f"{noun} {one}", Call("sagemaker", f"Delete{noun}", {f"{noun}Name": one}))
                )
    for alarm in clients.call(
        Call("cloudwatch", "DescribeAlarms", {"AlarmNames": [*alarm_names(name)]})
    )["MetricAlarms"]:
        one = alarm["AlarmName"]
        found.append((f"alarm {one}", Call("cloudwatch", "DeleteAlarms", {"AlarmNames": [one]})))
    return found


def belongs(one: str, endpoint: str) -> bool:
    """Is that the name of a model or config of this endpoint?"""
    return bool(re.fullmatch(rf"{re.escape(endpoint)}-[0-9a-f]{{{DIGEST}}}", one))


def scaling(clients: Clients, name: str) -> Iterator[tuple[str, Call]]:
    service, dimension = "application-autoscaling", scaled(name)
    of = {"ServiceNamespace": "sagemaker"}
    told = clients.call(
        Call(service, "DescribeScalingPolicies", of | {"ResourceId": dimension["ResourceId"]})
    )
    for policy in told["ScalingPolicies"]:
        one = {"PolicyName": policy["PolicyName"]}
        yield (
            f"scaling policy {policy['PolicyName']}",
            Call(service, "DeleteScalingPolicy", one | dimension),
        )
    told = clients.call(
        Call(service, "DescribeScalableTargets", of | {"ResourceIds": [dimension["ResourceId"]]})
    )
    if told["ScalableTargets"]:
        yield f"scalable target of {name}", Call(service, "DeregisterScalableTarget", dimension)


def names(clients: Clients, noun: str, part: str = "") -> Iterator[str]:
    """All of that kind whose name contains `part`."""
    operation = {"EndpointConfig": "list_endpoint_configs", "Model": "list_models"}[noun]
    wanted = {"NameContains": part} if part else {}
    for page in clients["sagemaker"].get_paginator(operation).paginate(**wanted):
        yield from (one[f"{noun}Name"] for one in page[f"{noun}s"])


def delete(
    clients: Clients,
    name: str,
    found: list[tuple[str, Call]],
    tell: Tell,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    for what, call in found:
        tell(what)
        clients.call(call)
        if call.operation == "DeleteEndpoint":
            until_gone(clients, name, lambda state: tell(f"endpoint {name}: {state}"), sleep)


def weights(clients: Clients, name: str) -> list[str]:
    """The prefixes in S3 from which the endpoint's models read, and no other model of this region does."""
    ours, others = dict[str, None](), dict[str, None]()
    for model in names(clients, "Model"):
        told = clients.look(Call("sagemaker", "DescribeModel", {"ModelName": model})) or {}
        container = told.get("PrimaryContainer", {})
        for source in [
            container.get("ModelDataSource", {}),
            *container.get("AdditionalModelDataSources", []),
        ]:
            if uri := source.get("S3DataSource", {}).get("S3Uri"):
                (ours if belongs(model, name) else others)[uri] = None
    return [
        uri
        for uri in ours
        if not any(other.startswith(uri) or uri.startswith(other) for other in others)
    ]


def empty(client: Any, uri: str) -> int:
    """How many objects were deleted."""
    from botocore.exceptions import ClientError

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    count = 0
    try:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            if keys := [{"Key": one["Key"]} for one in page.get("Contents", [])]:
                client.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
                count += len(keys)
    except ClientError as error:
        if not absent(error):
            raise
    return count
