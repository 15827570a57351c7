"""SageMaker's contract: a container started as `serve`, told by its environment what to serve.

    SM_VLLM_MAX_MODEL_LEN=8192           --max-model-len 8192
    SM_VLLM_ENFORCE_EAGER=true (or "")   --enforce-eager              false: left out
    SM_VLLM_SERVED_MODEL_NAME=["a","b"]  --served-model-name a b      an array: one word per element
    SM_VLLM_SPECULATIVE_CONFIG={...}     --speculative-config {...}   an object: as it is

With SM_VLLM_ENGINE=vllm, variables that we do not know are passed on to vLLM.
Model: SM_VLLM_MODEL > a non-empty /opt/ml/model > HF_MODEL_ID. The drafter lies on the channel `eagle`.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from peagle.errors import UserError, nearest

PREFIX = "SM_VLLM_"
MODEL = Path("opt/ml/model")
CHANNEL = Path("opt/ml/additional-model-data-sources/eagle")
ADDRESS = ["--host", "0.0.0.0", "--port", "8080"]
MOST_BYTES = 1024  # of one value, by SageMaker's own limit

VALUES = (  # options of `peagle serve` that take a value, under vLLM's names or ours
    "host",
    "port",
    "api-key",
    "served-model-name",
    "speculative-config",
    "max-model-len",
    "max-num-seqs",
    "max-num-batched-tokens",
    "dtype",
    "device",
    "method",
    "methods",
    "k",
    "tree",
    "max-queue",
    "max-batch",
    "kv-tokens",
    "context",
    "drafter",
    "target",
    "max-body-mb",
    "timeout",
    "drain-seconds",
    "engine",
    "replicas",
    "vllm-python",
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "data-parallel-size",
)
FLAGS = (
    "int8",
    "exact",
    "log-prompts",
    "trust-remote-code",
    "enforce-eager",
    "enable-prefix-caching",
    "no-enable-prefix-caching",
)
IGNORED = {  # they tune vLLM or its logs; an answer is the same without them
    "gpu-memory-utilization": "the engine takes 85 % of what is free",
    "disable-log-requests": "prompts are not logged anyway",
    "disable-log-stats": "there is /metrics",
    "max-log-len": "prompts are not logged anyway",
    "uvicorn-log-level": "logs are JSON lines",
    "enable-chunked-prefill": "prompts are always cut in chunks",
    "async-scheduling": "the host always runs one step behind",
    "generation-config": "defaults are OpenAI's",
    "swap-space": "a preempted request is computed again",
    "block-size": "pages hold 64 positions",
}


def is_sagemaker_environment(environment: Mapping[str, str] = os.environ) -> bool:
    """Does this environment speak to a SageMaker container?"""
    return any(name.startswith(PREFIX) for name in environment)


def serve_arguments(environment: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """The command line of `peagle serve` that this environment asks for."""
    words = [*ADDRESS]
    model = (
        environment.get(f"{PREFIX}MODEL")
        or folder_of(root / MODEL)
        or environment.get("HF_MODEL_ID")
    )
    if model:
        words += ["--model", model]
    given = dict(sorted(environment.items()))
    drafter = folder_of(root / CHANNEL)
    spoken = json_object(given.get(f"{PREFIX}SPECULATIVE_CONFIG", ""))
    if drafter and "model" not in spoken and f"{PREFIX}DRAFTER" not in given:
        words += ["--drafter", drafter]
    vllm = given.get(f"{PREFIX}ENGINE") == "vllm"
    for name, value in given.items():
        if name.startswith(PREFIX) and name != f"{PREFIX}MODEL":
            words += option(name, value, vllm)
    return words


def option(name: str, value: str, vllm: bool = False) -> list[str]:
    """`vllm`: what we do not know is vLLM's to judge."""
    if len(value.encode()) > MOST_BYTES:
        raise UserError(
            f"{name} has {len(value.encode())} bytes: SageMaker allows {MOST_BYTES} per value"
        )
    flag = name.removeprefix(PREFIX).lower().replace("_", "-")
    known = [*VALUES, *FLAGS, *IGNORED]
    if vllm and flag not in (*VALUES, *FLAGS):
        return (
            []
            if value == "false"
            else forward_to_vllm([f"--{flag}", *([] if value in ("true", "") else elements(value))])
        )
    if flag not in known:
        close = nearest(name, [PREFIX + word.upper().replace("-", "_") for word in known])
        raise UserError(f"{name} is not known: it would be --{flag} of peagle serve.{close}")
    if flag in IGNORED or value == "false":
        return []
    if flag in FLAGS or value in ("true", ""):
        return [f"--{flag}"]
    return [word for one in elements(value) for word in (f"--{flag}", one)]


def forward_to_vllm(words: Sequence[str]) -> list[str]:
    """Words for vLLM, as `peagle serve` takes them when something may come behind them."""
    return [f"--vllm-argument={word}" for word in words]


def elements(value: str) -> list[str]:
    """A JSON array is one word per element; anything else is itself."""
    try:
        found = json.loads(value)
    except ValueError:
        return [value]
    return [str(one) for one in found] if isinstance(found, list) else [value]


def json_object(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def folder_of(path: Path) -> str | None:
    """The folder, if there is anything in it."""
    return str(path) if path.is_dir() and any(path.iterdir()) else None
