"""The container's environment: every option of `vllm serve` as a variable SM_VLLM_X_Y, and where the weights lie."""

import json
from typing import Any

from peagle.deploy.spec import Deployment

PREFIX = "SM_VLLM_"
MODEL = "/opt/ml/model"
CHANNEL = "eagle"
CHANNEL_FOLDER = f"/opt/ml/additional-model-data-sources/{CHANNEL}"


def environment(deployment: Deployment) -> dict[str, str]:
    """Of a deployment whose target and drafter are places in the container, or hub ids."""
    options = deployment.options
    if (
        deployment.target != MODEL
    ):  # where something lies in that folder, the container takes it by itself
        options = {"model": deployment.target, **options}
    return {
        PREFIX + name.upper().replace("-", "_"): text(value) for name, value in options.items()
    } | (deployment.environment)


def text(value: Any) -> str:
    """As the container reads it: true, a JSON array or object in one line, or the value itself."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
