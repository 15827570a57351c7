"""A stack as a list of steps, in the order in which they would be done. What only reads is left out."""

from typing import Any

from peagle.deploy.sagemaker.output.secrets import veiled
from peagle.deploy.sagemaker.resources.calls import Call, Resource
from peagle.deploy.sagemaker.resources.stack import Stack, Upload


def steps(stack: Stack) -> list[dict[str, Any]]:
    waits = any(resource.kind == "scaling policy" for resource in stack.resources)
    found = [upload_step(upload) for upload in stack.uploads]
    for resource in stack.resources:
        found.append(call_step(resource))
        if resource.kind == "endpoint" and waits:
            found.append({"wait": f"until {resource.name} is InService"})
    return found


def upload_step(upload: Upload) -> dict[str, Any]:
    """Without `files` where they are not on this machine yet."""
    folder = upload.artifact.folder
    told: dict[str, Any] = {"upload": upload.what, "from": upload.artifact.source, "to": upload.uri}
    if folder is not None:
        files = upload.artifact.files()
        told["files"] = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    return told


def call_step(resource: Resource) -> dict[str, Any]:
    told = told_of(resource.create)
    if resource.kind == "model":
        told["parameters"] = veiled(resource, lambda name: "***")
    if resource.change is not None and resource.change != resource.create:
        told["if_it_exists_otherwise"] = told_of(resource.change)
    return told


def told_of(call: Call) -> dict[str, Any]:
    return {"service": call.service, "operation": call.operation, "parameters": call.parameters}
