"""How a worker process is started."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

API_KEY_VARIABLES = ("PEAGLE_API_KEY", "SM_VLLM_API_KEY", "VLLM_API_KEY")
RESTART_TIMEOUT_SECONDS = 1200.0


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    socket: Path  # the Unix socket that the worker listens on
    # Seconds that a worker may report itself unhealthy, once it was ready, before it is restarted.
    unhealthy_timeout: float
    # Seconds that a restarted worker may take to become ready, before it is started once more.
    restart_timeout: float = RESTART_TIMEOUT_SECONDS


def inherited_environment() -> dict[str, str]:
    """Return this process's environment without API keys: only the gateway checks them."""
    return {name: value for name, value in os.environ.items() if name not in API_KEY_VARIABLES}
