"""How a process is started."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

API_KEY_VARIABLES = (
    "PEAGLE_API_KEY",
    "PEAGLE_LEARN_OPT_OUT",
    "SM_VLLM_API_KEY",
    "SM_VLLM_LEARN_OPT_OUT",
    "VLLM_API_KEY",
)


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    socket: Path  # a Unix socket of the process, in the folder of this server's sockets
    inherited_files: tuple[int, ...] = ()  # descriptors that the process gets


def inherited_environment() -> dict[str, str]:
    """Return this process's environment without API keys: only a web server checks them."""
    return {name: value for name, value in os.environ.items() if name not in API_KEY_VARIABLES}
