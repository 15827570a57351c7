"""A stack made true: what is missing is created, what differs is changed, what is as wanted is left alone.

Every step remembers how to be taken back. If one fails, those before it are taken back in reverse order; uploaded
weights stay, so that the next try begins where this one ended.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peagle.deploy.sagemaker.operate.clients import Clients, reason
from peagle.deploy.sagemaker.operate.wait import EndpointFailed, Tell, until_gone, until_serving
from peagle.deploy.sagemaker.resources.calls import Call, Parameters, Resource
from peagle.deploy.sagemaker.resources.stack import Stack
from peagle.errors import UserError

Sleep = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Done:
    kind: str
    name: str
    what: str  # created, changed, unchanged


@dataclass
class Apply:
    stack: Stack
    clients: Clients
    wait: bool = False
    tell: Tell = lambda line: None
    sleep: Sleep = time.sleep
    done: list[Done] = field(default_factory=list)
    undo: list[tuple[str, Callable[[], None]]] = field(default_factory=list)

    def run(self) -> list[Done]:
        from botocore.exceptions import BotoCoreError, ClientError

        step = ""
        try:
            for resource in self.stack.resources:
                step = f"{resource.kind} {resource.name}"
                self.tell(step)
                self.settle(resource)
                if resource.kind == "endpoint" and self.must_wait:
                    until_serving(
                        self.clients,
                        self.stack.name,
                        config_of(resource),
                        self.told_of(step),
                        self.sleep,
                    )
        except (BotoCoreError, ClientError, EndpointFailed) as error:
            raise UserError(self.failed(step, error)) from error
        return self.done

    @property
    def must_wait(self) -> bool:
        """Scaling can be registered only for an endpoint that serves."""
        return self.wait or self.stack.resources[-1].kind == "scaling policy"

    def told_of(self, step: str) -> Tell:
        return lambda status: self.tell(f"{step}: {status}")

    def settle(self, resource: Resource) -> None:
        found = self.clients.find(resource)
        if found is None:
            self.clients.call(resource.create)
            self.undo.append((f"{resource.kind} {resource.name}", lambda: self.remove(resource)))
            what = "created"
        elif differs(resource, found):
            require_changeable(resource, found)
            assert resource.change is not None
            self.clients.call(resource.change)
            self.undo.append(
                (
                    f"change of {resource.kind} {resource.name}",
                    lambda: self.restore(resource, found),
                )
            )
            what = "changed"
        else:
            require_changeable(resource, found)
            what = "unchanged"
        self.done.append(Done(resource.kind, resource.name, what))

    def remove(self, resource: Resource) -> None:
        self.clients.call(resource.delete)
        if resource.kind == "endpoint":
            until_gone(self.clients, resource.name, self.told_of("taking back"), self.sleep)

    def restore(self, resource: Resource, found: Mapping[str, Any]) -> None:
        """As it was found. An update that SageMaker has rolled back by itself is as it was."""
        if resource.kind != "endpoint":
            before = {key: found[key] for key in resource.create.parameters if key in found}
            self.clients.call(Call(resource.create.service, resource.create.operation, before))
            return
        now = self.clients.find(resource) or {}
        config = found["EndpointConfigName"]
        if now.get("EndpointConfigName") != config:
            named = {"EndpointName": resource.name, "EndpointConfigName": config}
            self.clients.call(Call("sagemaker", "UpdateEndpoint", named))
            until_serving(
                self.clients, resource.name, config, self.told_of("taking back"), self.sleep
            )

    def failed(self, step: str, error: Exception) -> str:
        """Takes everything back, and says so."""
        from botocore.exceptions import BotoCoreError, ClientError

        removed, left = [], []
        for what, back in reversed(self.undo):
            try:
                back()
                removed.append(what)
            except (BotoCoreError, ClientError, EndpointFailed) as trouble:
                left.append(f"{what} ({reason(trouble)})")
        lines = [f"{step}: {reason(error)}", f"log group {self.stack.logs}"]
        lines += [f"taken back: {', '.join(removed)}"] if removed else ["nothing had been created"]
        lines += [f"LEFT, remove it by hand: {', '.join(left)}"] if left else []
        lines += ["uploaded weights stay for the next try"] if self.stack.uploads else []
        return "; ".join(lines)


def config_of(endpoint: Resource) -> str:
    return str(endpoint.create.parameters["EndpointConfigName"])


def require_changeable(resource: Resource, found: Mapping[str, Any]) -> None:
    if resource.kind == "endpoint" and found["EndpointStatus"] in (
        "Failed",
        "UpdateRollbackFailed",
        "Deleting",
    ):
        why = found.get("FailureReason") or "no reason given"
        raise EndpointFailed(
            f"it is {found['EndpointStatus']} ({why}): `peagle sagemaker delete {resource.name}` first"
        )


def differs(resource: Resource, found: Mapping[str, Any]) -> bool:
    """Models and configs bear their content's digest: found is the same. Tags of others are not looked at."""
    if resource.change is None:
        return False
    if resource.kind == "endpoint":
        return bool(found["EndpointConfigName"] != config_of(resource))
    wanted: Parameters = {
        key: value for key, value in resource.create.parameters.items() if key != "Tags"
    }
    return not covers(found, wanted)


def covers(found: Any, wanted: Any) -> bool:
    """Is all that is wanted there? More may be: what AWS adds by itself."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(
            key in found and covers(found[key], wanted[key]) for key in wanted
        )
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        same = isinstance(found, Sequence) and len(found) == len(wanted)
        return same and all(covers(one, other) for one, other in zip(found, wanted, strict=True))
    return bool(found == wanted)
