"""Redaction of secret environment variables.

A variable is secret if the last word of its name says so: HF_TOKEN, SM_VLLM_API_KEY.
"""

from collections.abc import Callable
from typing import Any

from peagle.deploy.sagemaker.resources.calls import Parameters, Resource

SECRET_SUFFIXES = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIALS")


def secret_names(model: Resource) -> list[str]:
    return [
        name
        for name in environment_variables(model)
        if name.upper().split("_")[-1] in SECRET_SUFFIXES
    ]


def redacted_parameters(model: Resource, placeholder: Callable[[str], Any]) -> Parameters:
    """The parameters that create the model, with `placeholder(name)` as value of each secret."""
    parameters = model.create.parameters
    container = parameters["PrimaryContainer"]
    secrets = {name: placeholder(name) for name in secret_names(model)}
    variables = environment_variables(model) | secrets
    return parameters | {"PrimaryContainer": container | {"Environment": variables}}


def environment_variables(model: Resource) -> dict[str, Any]:
    variables = model.create.parameters["PrimaryContainer"]["Environment"]
    assert isinstance(variables, dict)
    return variables
