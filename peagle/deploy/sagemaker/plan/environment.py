"""The container's environment: each option of `vllm serve` as a variable SM_VLLM_X_Y."""

import json
from typing import Any

from peagle.deploy.spec import Deployment

VLLM_PREFIX = "SM_VLLM_"
MODEL_FOLDER = "/opt/ml/model"
# Folder of the tiktoken files: with it, gpt-oss starts without a network.
TIKTOKEN_VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
CHANNEL = "eagle"
CHANNEL_FOLDER = f"/opt/ml/additional-model-data-sources/{CHANNEL}"


def container_environment(deployment: Deployment) -> dict[str, str]:
    """Variables for a deployment whose target and drafter are container folders or hub ids."""
    options = deployment.options
    if deployment.target != MODEL_FOLDER:  # the container serves a non-empty MODEL_FOLDER by itself
        options = {"model": deployment.target, **options}
    variables = {
        VLLM_PREFIX + name.upper().replace("-", "_"): variable_text(value)
        for name, value in options.items()
    }
    return variables | deployment.environment


def variable_text(value: Any) -> str:
    """The value as the container parses it: a string, or JSON on one line."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
