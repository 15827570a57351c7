"""StackUpdate: create what is missing, update what differs, leave the rest unchanged.

If a step fails, the steps before it are rolled back in reverse order. Uploaded weights stay, so
that the next run continues where this one stopped.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from peagle.deploy.sagemaker.operate.clients import Clients, error_message
from peagle.deploy.sagemaker.operate.wait import (
    EndpointFailed,
    Sleep,
    StatusCallback,
    wait_until_deleted,
    wait_until_in_service,
)
from peagle.deploy.sagemaker.resources.calls import Call, Resource
from peagle.deploy.sagemaker.resources.stack import Stack
from peagle.errors import UserError

UNUSABLE_STATUSES = ("Failed", "UpdateRollbackFailed", "Deleting")
Outcome = Literal["created", "changed", "unchanged"]


@dataclass(frozen=True, slots=True)
class StepResult:
    kind: str
    name: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class RollbackStep:
    description: str
    run: Callable[[], None]


@dataclass
class StackUpdate:
    stack: Stack
    clients: Clients
    wait: bool = False  # wait until the endpoint is in service
    on_status: StatusCallback = lambda line: None
    sleep: Sleep = time.sleep
    results: list[StepResult] = field(default_factory=list)
    rollback_steps: list[RollbackStep] = field(default_factory=list)

    def apply(self) -> list[StepResult]:
        from botocore.exceptions import BotoCoreError, ClientError

        step = ""
        try:
            for resource in self.stack.resources:
                step = f"{resource.kind} {resource.name}"
                self.on_status(step)
                self._reconcile(resource)
                if resource.kind == "endpoint" and self._must_wait:
                    self._wait_for_endpoint(step, config_name(resource))
        except (BotoCoreError, ClientError, EndpointFailed) as error:
            raise UserError(self._roll_back(step, error)) from error
        return self.results

    @property
    def _must_wait(self) -> bool:
        """Autoscaling can be registered only for an endpoint that is in service."""
        return self.wait or self.stack.resources[-1].kind == "scaling policy"

    def _wait_for_endpoint(self, step: str, config: str) -> None:
        wait_until_in_service(
            self.clients, self.stack.name, config, self._step_status(step), self.sleep
        )

    def _step_status(self, step: str) -> StatusCallback:
        return lambda status: self.on_status(f"{step}: {status}")

    def _reconcile(self, resource: Resource) -> None:
        """Create the resource, or update it if it differs."""
        existing = self.clients.find(resource)
        outcome: Outcome = "unchanged"
        if existing is None:
            self.clients.call(resource.create)
            self._add_rollback(f"{resource.kind} {resource.name}", lambda: self._remove(resource))
            outcome = "created"
        else:
            changed = differs(resource, existing)
            check_usable(resource, existing)
            if changed:
                assert resource.update is not None
                self.clients.call(resource.update)
                self._add_rollback(
                    f"change of {resource.kind} {resource.name}",
                    lambda: self._restore(resource, existing),
                )
                outcome = "changed"
        self.results.append(StepResult(resource.kind, resource.name, outcome))

    def _add_rollback(self, description: str, run: Callable[[], None]) -> None:
        self.rollback_steps.append(RollbackStep(description, run))

    def _remove(self, resource: Resource) -> None:
        self.clients.call(resource.delete)
        if resource.kind == "endpoint":
            wait_until_deleted(
                self.clients, resource.name, self._step_status("rolling back"), self.sleep
            )

    def _restore(self, resource: Resource, previous: Mapping[str, Any]) -> None:
        """Restore the previous state, unless SageMaker has already rolled back by itself."""
        if resource.kind != "endpoint":
            parameters = {
                key: previous[key] for key in resource.create.parameters if key in previous
            }
            self.clients.call(Call(resource.create.service, resource.create.operation, parameters))
            return
        current = self.clients.find(resource) or {}
        config = previous["EndpointConfigName"]
        if current.get("EndpointConfigName") != config:
            parameters = {"EndpointName": resource.name, "EndpointConfigName": config}
            self.clients.call(Call("sagemaker", "UpdateEndpoint", parameters))
            self._wait_for_endpoint("rolling back", config)

    def _roll_back(self, step: str, error: Exception) -> str:
        """Undo all steps; return the message about the failed one."""
        from botocore.exceptions import BotoCoreError, ClientError

        undone = []
        failed = []
        for rollback in reversed(self.rollback_steps):
            try:
                rollback.run()
                undone.append(rollback.description)
            except (BotoCoreError, ClientError, EndpointFailed) as rollback_error:
                failed.append(f"{rollback.description} ({error_message(rollback_error)})")
        lines = [f"{step}: {error_message(error)}", f"log group {self.stack.log_group}"]
        lines.append(f"rolled back: {', '.join(undone)}" if undone else "nothing was created")
        if failed:
            lines.append(f"NOT rolled back, remove it by hand: {', '.join(failed)}")
        if self.stack.uploads:
            lines.append("uploaded weights stay for the next run")
        return "; ".join(lines)


def config_name(endpoint: Resource) -> str:
    return str(endpoint.create.parameters["EndpointConfigName"])


def check_usable(resource: Resource, existing: Mapping[str, Any]) -> None:
    if resource.kind == "endpoint" and existing["EndpointStatus"] in UNUSABLE_STATUSES:
        reason = existing.get("FailureReason") or "no reason given"
        raise EndpointFailed(
            f"its status is {existing['EndpointStatus']} ({reason}):"
            f" run `peagle sagemaker delete {resource.name}` first"
        )


def differs(resource: Resource, existing: Mapping[str, Any]) -> bool:
    """Whether the resource needs an update. Tags are not compared.

    The names of models and configs contain a digest of their parameters, so existing ones match.
    """
    if resource.update is None:
        return False
    if resource.kind == "endpoint":
        return bool(existing["EndpointConfigName"] != config_name(resource))
    desired = {key: value for key, value in resource.create.parameters.items() if key != "Tags"}
    return not contains(existing, desired)


def contains(actual: Any, desired: Any) -> bool:
    """Whether `actual` has everything of `desired`; AWS may have added more keys."""
    if isinstance(desired, Mapping):
        return isinstance(actual, Mapping) and all(
            key in actual and contains(actual[key], desired[key]) for key in desired
        )
    if isinstance(desired, Sequence) and not isinstance(desired, str):
        same_length = isinstance(actual, Sequence) and len(actual) == len(desired)
        return same_length and all(
            contains(left, right) for left, right in zip(actual, desired, strict=True)
        )
    return bool(actual == desired)
