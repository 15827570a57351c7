"""Variables whose values are not for print, known by the last word of their names: HF_TOKEN, SM_VLLM_API_KEY."""

from collections.abc import Callable
from typing import Any

from peagle.deploy.sagemaker.resources.calls import Parameters, Resource

WORDS = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIALS")


def secrets(model: Resource) -> list[str]:
    return [name for name in variables(model) if name.upper().split("_")[-1] in WORDS]


def veiled(model: Resource, veil: Callable[[str], Any]) -> Parameters:
    """What creates the model, with `veil` of its name instead of each secret."""
    given = model.create.parameters
    shown = variables(model) | {name: veil(name) for name in secrets(model)}
    return given | {"PrimaryContainer": given["PrimaryContainer"] | {"Environment": shown}}


def variables(model: Resource) -> dict[str, Any]:
    found = model.create.parameters["PrimaryContainer"]["Environment"]
    assert isinstance(found, dict)
    return found
