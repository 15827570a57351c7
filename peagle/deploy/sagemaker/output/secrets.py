"""Redaction of secret environment variables: `Stack.secrets` says which they are."""

from collections.abc import Callable, Collection
from typing import Any

from peagle.deploy.sagemaker.resources.calls import Parameters, Resource
from peagle.deploy.sagemaker.resources.stack import Stack


def redacted_parameters(
    model: Resource, stack: Stack, placeholder: Callable[[str], Any]
) -> Parameters:
    """The parameters that create the model, with `placeholder(name)` as value of each secret."""
    parameters = model.create.parameters
    container = parameters["PrimaryContainer"]
    variables = {
        name: placeholder(name) if name in stack.secrets else value
        for name, value in container["Environment"].items()
    }
    return parameters | {"PrimaryContainer": container | {"Environment": variables}}


def template_names(
    stack: Stack, convert: Callable[[str], str], taken: Collection[str]
) -> dict[str, str]:
    """The names of the secrets in a template, each different from the others and from `taken`."""
    names: dict[str, str] = {}
    used = set(taken)
    for variable in sorted(stack.secrets):
        name = convert(variable)
        while name in used:
            name += "x"
        names[variable] = name
        used.add(name)
    return names
