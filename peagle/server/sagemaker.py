"""SageMaker's container contract: environment variables become options of `peagle serve`.

    SM_VLLM_MAX_MODEL_LEN=8192           --max-model-len 8192
    SM_VLLM_ENFORCE_EAGER=true (or "")   --enforce-eager              false: left out
    SM_VLLM_EXACT=false                  --no-exact
    SM_VLLM_SERVED_MODEL_NAME=["a","b"]  --served-model-name a --served-model-name b
    SM_VLLM_SPECULATIVE_CONFIG={...}     --speculative-config {...}   objects stay as they are

With SM_VLLM_ENGINE=vllm, unknown variables are passed on to vLLM.
Model: SM_VLLM_MODEL > a non-empty /opt/ml/model > HF_MODEL_ID. The drafter is on the channel
`eagle`.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from peagle.errors import UserError, did_you_mean

PREFIX = "SM_VLLM_"
# Relative to the root of the file system.
MODEL_FOLDER = Path("opt/ml/model")
DRAFTER_FOLDER = Path("opt/ml/additional-model-data-sources/eagle")
ADDRESS_OPTIONS = ("--host", "0.0.0.0", "--port", "8080")
MAX_VALUE_BYTES = 1024  # SageMaker's limit for the value of one variable

# Options of `peagle serve` that take a value, under vLLM's names or its own.
VALUE_OPTIONS = (
    "host",
    "port",
    "api-key",
    "allow-origin",
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
    "drafter-window",
    "target",
    "max-body-mb",
    "timeout",
    "step-timeout",
    "drain-seconds",
    "engine",
    "replicas",
    "http-workers",
    "learn",
    "learn-share",
    "learn-size",
    "learn-days",
    "learn-opt-out",
    "learn-time",
    "learn-memory",
    "learn-replay",
    "vllm-python",
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "data-parallel-size",
    "tool-parser",
    "tool-call-parser",
    "reasoning-parser",
)
FLAG_OPTIONS = (
    "int8",
    "exact",
    "no-exact",
    "ngram",
    "no-ngram",
    "log-prompts",
    "trust-remote-code",
    "enforce-eager",
    "enable-prefix-caching",
    "no-enable-prefix-caching",
)
# Options that vLLM has too: it gets them, because each engine parses its own answers.
PARSER_OPTIONS = ("tool-call-parser", "reasoning-parser")
# Options that tune vLLM or its logs and do not change answers; why the native engine needs none.
IGNORED_OPTIONS = {
    "gpu-memory-utilization": "the engine uses 85 % of the free memory",
    "disable-log-requests": "prompts are not logged by default",
    "disable-log-stats": "statistics are at /metrics",
    "max-log-len": "prompts are not logged by default",
    "uvicorn-log-level": "logs are JSON lines",
    "enable-chunked-prefill": "prefill is always chunked",
    "async-scheduling": "the host always runs one step behind the device",
    "generation-config": "the defaults are OpenAI's",
    "swap-space": "preempted requests are recomputed",
    "block-size": "pages hold 64 positions",
    "enable-auto-tool-choice": "tool calls are always parsed",
}


def is_sagemaker_environment() -> bool:
    return any(name.startswith(PREFIX) for name in os.environ)


def serve_arguments(environment: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Return the command-line arguments of `peagle serve` for this environment."""
    arguments = [*ADDRESS_OPTIONS]
    model = (
        environment.get(f"{PREFIX}MODEL")
        or non_empty_folder(root / MODEL_FOLDER)
        or environment.get("HF_MODEL_ID")
    )
    if model:
        arguments += ["--model", model]
    drafter = non_empty_folder(root / DRAFTER_FOLDER)
    if drafter and not names_drafter(environment):
        arguments += ["--drafter", drafter]
    for_vllm = environment.get(f"{PREFIX}ENGINE") == "vllm"
    for name, value in sorted(environment.items()):
        if name.startswith(PREFIX) and name != f"{PREFIX}MODEL":
            arguments += option_arguments(name, value, for_vllm)
    return arguments


def names_drafter(environment: Mapping[str, str]) -> bool:
    if f"{PREFIX}DRAFTER" in environment:
        return True
    try:
        config = json.loads(environment.get(f"{PREFIX}SPECULATIVE_CONFIG", ""))
    except ValueError:
        return False
    return isinstance(config, dict) and "model" in config


def option_arguments(name: str, value: str, for_vllm: bool = False) -> list[str]:
    """Convert one variable; with `for_vllm`, unknown variables are passed on to vLLM."""
    size = len(value.encode())
    if size > MAX_VALUE_BYTES:
        raise UserError(f"{name} has {size} bytes: SageMaker allows {MAX_VALUE_BYTES} per value")
    option = name.removeprefix(PREFIX).lower().replace("_", "-")
    is_native = option in VALUE_OPTIONS or option in FLAG_OPTIONS
    if for_vllm and option in PARSER_OPTIONS:
        is_native = False
    if not is_native and not for_vllm:
        check_ignored(name, option)
        return []
    if option in FLAG_OPTIONS:
        value = flag_value(name, value)
    if value == "false":
        return [f"--no-{option}"] if f"no-{option}" in FLAG_OPTIONS else []
    is_flag = value in ("true", "")
    values = [] if is_flag else split_array(value)
    if not is_native:
        return forward_to_vllm([f"--{option}", *values])
    if is_flag:
        return [f"--{option}"]
    return [word for element in values for word in (f"--{option}", element)]


def flag_value(name: str, value: str) -> str:
    """The value of a flag of our own, as "true" or "false"."""
    word = value.lower()
    if word not in ("true", "1", "", "false", "0"):
        raise UserError(f"{name} is {value[:40]!r}: set it to true or false")
    return "false" if word in ("false", "0") else "true"


def check_ignored(name: str, option: str) -> None:
    if option not in IGNORED_OPTIONS:
        known = [*VALUE_OPTIONS, *FLAG_OPTIONS, *IGNORED_OPTIONS]
        variables = [PREFIX + word.upper().replace("-", "_") for word in known]
        raise UserError(
            f"{name} is unknown: peagle serve has no --{option}.{did_you_mean(name, variables)}"
        )


def forward_to_vllm(words: Sequence[str]) -> list[str]:
    """Wrap words of vLLM's command line in an option, so that other options can follow them."""
    return [f"--vllm-argument={word}" for word in words]


def split_array(value: str) -> list[str]:
    """Return the elements of a JSON array; any other value is a single element."""
    try:
        array = json.loads(value)
    except ValueError:
        return [value]
    return [str(element) for element in array] if isinstance(array, list) else [value]


def non_empty_folder(path: Path) -> str | None:
    return str(path) if path.is_dir() and any(path.iterdir()) else None
