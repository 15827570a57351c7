"""The command line and the environment of vLLM's API server, from the settings of this server."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peagle.core import Method
from peagle.server.settings import ServerSettings
from peagle.server.supervisor.launch_spec import inherited_environment
from peagle.server.vllm.vllm_version import REQUEST_METRICS, VllmInstallation

API_SERVER = "vllm.entrypoints.openai.api_server"
DEFAULT_CPU_KV_GIB = "4"  # size of the KV cache on a CPU


def vllm_arguments(
    settings: ServerSettings,
    installation: VllmInstallation,
    target: Path,
    socket: Path,
    speculative_config: Mapping[str, Any],
) -> list[str]:
    """Return the arguments of the interpreter; the user's own come last and take precedence."""
    arguments = ["-m", API_SERVER, "--model", str(target), "--uds", str(socket)]
    arguments += ["--served-model-name", *settings.model_names]
    arguments += ["--max-num-seqs", str(settings.max_batch), "--dtype", settings.dtype]
    caching = settings.prefix_caching
    arguments += ["--enable-prefix-caching" if caching else "--no-enable-prefix-caching"]
    arguments += ["--disable-uvicorn-access-log"]
    if speculative_config and installation.version >= REQUEST_METRICS:
        arguments += ["--per-request-spec-decode-metrics", "summary"]
    arguments += size_arguments(settings)
    if not settings.graphs:
        arguments += ["--enforce-eager"]
    if settings.trust_remote_code:
        arguments += ["--trust-remote-code"]
    if speculative_config:
        arguments += ["--speculative-config", json.dumps(speculative_config)]
    return [*arguments, *settings.vllm_arguments]


def size_arguments(settings: ServerSettings) -> list[str]:
    """Return the options for sizes that differ from vLLM's defaults."""
    limits = {
        "--max-model-len": settings.context,
        "--max-num-batched-tokens": settings.chunk,
    }
    parallel_sizes = {
        "--tensor-parallel-size": settings.tensor_parallel,
        "--pipeline-parallel-size": settings.pipeline_parallel,
        "--data-parallel-size": settings.data_parallel,
    }
    sizes = {option: value for option, value in limits.items() if value is not None}
    sizes |= {option: value for option, value in parallel_sizes.items() if value > 1}
    return [word for option, value in sizes.items() for word in (option, str(value))]


def vllm_environment(
    installation: VllmInstallation, settings: ServerSettings, method: Method
) -> dict[str, str]:
    """Return the environment: the user's own takes precedence over the defaults."""
    defaults = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if installation.is_cpu_build or settings.device == "cpu":
        defaults["VLLM_CPU_KVCACHE_SPACE"] = DEFAULT_CPU_KV_GIB
    # P-EAGLE runs on the first model runner only, whatever the user's environment says.
    required = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if method == "p-eagle" else {}
    return defaults | inherited_environment() | required
