"""Waiting until an endpoint is in service, or until it is deleted."""

import time
from collections.abc import Callable
from typing import Any

from peagle.deploy.sagemaker.operate.clients import Clients
from peagle.deploy.sagemaker.resources.calls import Call

POLL_SECONDS = 30.0
DELETE_POLL_SECONDS = 5.0
MAX_POLLS = 120
TRANSITIONAL_STATUSES = ("Creating", "Updating", "SystemUpdating", "RollingBack")
Sleep = Callable[[float], None]
StatusCallback = Callable[[str], None]


class EndpointFailed(Exception):
    """The message contains SageMaker's FailureReason."""


def describe_endpoint(clients: Clients, name: str) -> dict[str, Any] | None:
    return clients.read(Call("sagemaker", "DescribeEndpoint", {"EndpointName": name}))


def wait_until_in_service(
    clients: Clients,
    name: str,
    config: str,
    on_status: StatusCallback,
    sleep: Sleep = time.sleep,
) -> None:
    """Wait until the endpoint serves with the config `config`.

    An endpoint whose update was rolled back is in service too, but with the old config. The first
    poll may come before the update is visible, so only later ones detect a rollback.
    """
    for poll in range(MAX_POLLS):
        endpoint = describe_endpoint(clients, name) or {"EndpointStatus": "gone"}
        status = endpoint["EndpointStatus"]
        reason = endpoint.get("FailureReason") or "SageMaker gives no reason"
        on_status(status)
        if status == "InService" and endpoint["EndpointConfigName"] == config:
            return
        if status == "InService" and poll > 0:
            raise EndpointFailed(f"the update was rolled back: {reason}")
        if status not in (*TRANSITIONAL_STATUSES, "InService"):
            raise EndpointFailed(f"the endpoint is {status}: {reason}")
        sleep(POLL_SECONDS)
    minutes = MAX_POLLS * POLL_SECONDS / 60
    raise EndpointFailed(f"the endpoint is still {status} after {minutes:.0f} minutes")


def wait_until_deleted(
    clients: Clients, name: str, on_status: StatusCallback, sleep: Sleep = time.sleep
) -> None:
    for _ in range(MAX_POLLS):
        endpoint = describe_endpoint(clients, name)
        if endpoint is None:
            return
        on_status(endpoint["EndpointStatus"])
        sleep(DELETE_POLL_SECONDS)
    minutes = MAX_POLLS * DELETE_POLL_SECONDS / 60
    raise EndpointFailed(f"the endpoint still exists after {minutes:.0f} minutes")
