"""VllmLaunch: how vLLM is started: the interpreter, the command line, the exported drafter, K."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peagle.catalog import find_pair
from peagle.catalog.pair import DrafterSource, Pair
from peagle.catalog.tuned import machine_of, read_tuned, tuned_path
from peagle.core import Method
from peagle.errors import UserError
from peagle.pull import pull
from peagle.server.engines.method_choice import LOW_CONCURRENCY, choose_method
from peagle.server.http.logs import log_event
from peagle.server.settings import ServerSettings
from peagle.server.vllm.vllm_command import vllm_arguments, vllm_environment
from peagle.server.vllm.vllm_drafter import (
    drafter_method,
    is_speculators,
    prepare_drafter,
    read_config,
)
from peagle.server.vllm.vllm_version import VllmInstallation, find_vllm


@dataclass(frozen=True, slots=True)
class VllmLaunch:
    command: tuple[str, ...]
    environment: Mapping[str, str]
    method: Method
    k: int  # 0: there is no drafter.


def prepare_launch(settings: ServerSettings, socket: Path) -> VllmLaunch:
    """Refuse what this vLLM does not support before anything is started.

    This may take long: it downloads the target and exports the drafter where that is needed.
    """
    installation = find_vllm(settings.vllm_python)
    if settings.device == "cpu" and not installation.is_cpu_build:
        raise UserError(
            f"`device` is cpu, but the vLLM of {installation.python} is built for GPUs: name"
            " another interpreter with `vllm_python`"
        )
    pair = find_served_pair(settings)
    (method, _), _ = choose_method(settings, pair)
    target = pull(find_pair(settings.target) if settings.target else pair)
    source = pair.drafter(method) if method != "none" else None
    check_drafter(installation, method, source, target)
    k = 0
    speculative: dict[str, Any] = {}
    if source is not None:
        k = choose_k(settings, pair, method)
        drafter = prepare_drafter(pair.name, method, source, target, settings.dtype, k)
        speculative = speculative_config(settings, method, k, drafter)
    arguments = vllm_arguments(settings, installation, target, socket, speculative)
    environment = vllm_environment(installation, settings, method)
    version = installation.version_text
    log_event("vLLM", version=version, python=installation.python, method=method, k=k)
    return VllmLaunch((installation.python, *arguments), environment, method, k)


def check_drafter(
    installation: VllmInstallation, method: Method, source: DrafterSource | None, target: Path
) -> None:
    """Check that this vLLM supports the drafter."""
    folder = source.folder if source is not None else None
    speculators = folder is not None and is_speculators(read_config(folder))
    model_type = str(read_config(target).get("model_type", ""))
    for warning in installation.check(method, speculators, model_type):
        log_event(warning, logging.WARNING)


def choose_k(settings: ServerSettings, pair: Pair, method: Method) -> int:
    """Return the fixed K that vLLM runs with."""
    if isinstance(settings.k, int):
        return settings.k
    best = pair.best(LOW_CONCURRENCY)
    k = best.k if best.method == method and best.k else pair.k
    log_event("vLLM has no automatic K: using the pair's K", k=k)
    return k


def speculative_config(
    settings: ServerSettings, method: Method, k: int, drafter: Path
) -> dict[str, Any]:
    """Return vLLM's speculative config, with every key set that vLLM would otherwise guess."""
    return {
        **settings.vllm_speculative,
        "method": "eagle3",
        "model": str(drafter),
        "num_speculative_tokens": k,
        "parallel_drafting": method == "p-eagle",
    }


def find_served_pair(settings: ServerSettings) -> Pair:
    """Return the pair, with the drafter of the settings, or with what `peagle tune` has found."""
    pair = find_pair(settings.pair)
    if settings.drafter is not None:
        folder = Path(settings.drafter).expanduser()
        if not folder.is_dir():
            raise UserError(
                f"there is no drafter in {settings.drafter}: no such folder (vLLM takes one)"
            )
        method = drafter_method(read_config(folder))
        return replace(pair, method=method, drafters={method: DrafterSource(folder=folder)})
    if settings.target is None and tuned_path(pair).is_file():
        # These import torch, which the gateway does not need otherwise.
        from peagle.model_pair import choose_device
        from peagle.target.precision import choose_dtype

        device = choose_device(settings.device)
        machine = machine_of(device, choose_dtype(settings.dtype, device))
        return replace(pair, k_by_concurrency=read_tuned(pair, machine))
    return pair
