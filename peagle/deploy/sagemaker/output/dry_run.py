"""A stack as a list of steps, in the order of execution. Calls that only read are omitted."""

from typing import Any

from peagle.deploy.sagemaker.output.secrets import redacted_parameters
from peagle.deploy.sagemaker.resources.calls import Call, Resource
from peagle.deploy.sagemaker.resources.stack import Stack, Upload


def dry_run_steps(stack: Stack) -> list[dict[str, Any]]:
    has_scaling = any(resource.kind == "scaling policy" for resource in stack.resources)
    steps = [upload_step(upload) for upload in stack.uploads]
    for resource in stack.resources:
        steps.append(resource_step(resource, stack))
        if resource.kind == "endpoint" and has_scaling:
            steps.append({"wait": f"until {resource.name} is InService"})
    return steps


def upload_step(upload: Upload) -> dict[str, Any]:
    """The step of an upload, without `files` if they are not on this machine yet."""
    step: dict[str, Any] = {
        "upload": upload.kind,
        "from": upload.artifact.source,
        "to": upload.uri,
    }
    folder = upload.artifact.folder
    if folder is not None:
        files = upload.artifact.files()
        step["files"] = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    return step


def resource_step(resource: Resource, stack: Stack) -> dict[str, Any]:
    step = call_to_json(resource.create)
    if resource.kind == "model":
        step["parameters"] = redacted_parameters(resource, stack, lambda name: "***")
    if resource.update is not None and resource.update != resource.create:
        step["if_it_exists_otherwise"] = call_to_json(resource.update)
    return step


def call_to_json(call: Call) -> dict[str, Any]:
    return {"service": call.service, "operation": call.operation, "parameters": call.parameters}
