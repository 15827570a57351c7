"""Until an endpoint serves, or is gone."""

import time
from collections.abc import Callable
from typing import Any

from peagle.deploy.sagemaker.operate.clients import Clients
from peagle.deploy.sagemaker.resources.calls import Call

EVERY = 30.0  # seconds
TIMES = 120
UNDER_WAY = ("Creating", "Updating", "SystemUpdating", "RollingBack")
Tell = Callable[[str], None]


class EndpointFailed(Exception):
    """With SageMaker's FailureReason."""


def describe(clients: Clients, name: str) -> dict[str, Any] | None:
    return clients.look(Call("sagemaker", "DescribeEndpoint", {"EndpointName": name}))


def until_serving(
    clients: Clients,
    name: str,
    config: str,
    tell: Tell,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """With that config: an update that was rolled back serves too, but with the old one. Only the first look may come
    too early to see the update at all."""
    for look in range(TIMES):
        found = describe(clients, name) or {"EndpointStatus": "gone"}
        status, why = (
            found["EndpointStatus"],
            found.get("FailureReason") or "SageMaker gives no reason",
        )
        tell(status)
        if status == "InService" and found["EndpointConfigName"] == config:
            return
        if status == "InService" and look:
            raise EndpointFailed(f"the update was rolled back: {why}")
        if status not in (*UNDER_WAY, "InService"):
            raise EndpointFailed(f"the endpoint is {status}: {why}")
        sleep(EVERY)
    raise EndpointFailed(f"the endpoint is still {status} after {TIMES * EVERY / 60:.0f} minutes")


def until_gone(
    clients: Clients, name: str, tell: Tell, sleep: Callable[[float], None] = time.sleep
) -> None:
    for _ in range(TIMES):
        found = describe(clients, name)
        if found is None:
            return
        tell(found["EndpointStatus"])
        sleep(EVERY / 6)
    raise EndpointFailed(f"the endpoint is still there after {TIMES * EVERY / 360:.0f} minutes")
