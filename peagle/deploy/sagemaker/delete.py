"""An endpoint and all that belongs to it, gone: also the configs and models that earlier updates left."""

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from peagle.deploy.sagemaker.clients import Clients, absent
from peagle.deploy.sagemaker.limits import DIGEST
from peagle.deploy.sagemaker.stack import Call, scaled
from peagle.deploy.sagemaker.wait import Tell, until_gone


def belongings(clients: Clients, name: str) -> list[tuple[str, Call]]:
    """In the order in which they can go."""
    ours = re.compile(rf"{re.escape(name)}-[0-9a-f]{{{DIGEST}}}")
    found = []
    of = {"ServiceNamespace": "sagemaker", "ResourceIds": [scaled(name)["ResourceId"]]}
    if clients.look(Call("application-autoscaling", "DescribeScalableTargets", of), "ScalableTargets[0]"):
        found.append(("scaling", Call("application-autoscaling", "DeregisterScalableTarget", scaled(name))))
    if clients.look(Call("sagemaker", "DescribeEndpoint", {"EndpointName": name})):
        found.append((f"endpoint {name}", Call("sagemaker", "DeleteEndpoint", {"EndpointName": name})))
    for noun in ("EndpointConfig", "Model"):
        for one in names(clients, noun, name):
            if ours.fullmatch(one):
                found.append((f"{noun} {one}", Call("sagemaker", f"Delete{noun}", {f"{noun}Name": one})))
    told = [f"{name}-errors", f"{name}-latency"]
    for alarm in clients.call(Call("cloudwatch", "DescribeAlarms", {"AlarmNames": told}))["MetricAlarms"]:
        one = alarm["AlarmName"]
        found.append((f"alarm {one}", Call("cloudwatch", "DeleteAlarms", {"AlarmNames": [one]})))
    return found


def names(clients: Clients, noun: str, part: str) -> Iterator[str]:
    """All of that kind whose name contains `part`."""
    operation = {"EndpointConfig": "list_endpoint_configs", "Model": "list_models"}[noun]
    for page in clients["sagemaker"].get_paginator(operation).paginate(NameContains=part):
        yield from (one[f"{noun}Name"] for one in page[f"{noun}s"])


def delete(
    clients: Clients, name: str, found: list[tuple[str, Call]], tell: Tell, sleep: Callable[[float], None] = time.sleep
) -> None:
    for what, call in found:
        tell(what)
        clients.call(call)
        if call.operation == "DeleteEndpoint":
            until_gone(clients, name, lambda state: tell(f"endpoint {name}: {state}"), sleep)


def weights(clients: Clients, name: str) -> list[str]:
    """The prefixes in S3 from which the endpoint's models read."""
    found: dict[str, None] = {}
    for model in names(clients, "Model", f"{name}-"):
        told = clients.look(Call("sagemaker", "DescribeModel", {"ModelName": model})) or {}
        container = told.get("PrimaryContainer", {})
        for source in [container.get("ModelDataSource", {}), *container.get("AdditionalModelDataSources", [])]:
            if uri := source.get("S3DataSource", {}).get("S3Uri"):
                found[uri] = None
    return list(found)


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
