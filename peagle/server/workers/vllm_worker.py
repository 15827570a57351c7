"""A worker that is vLLM's own API server."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from peagle.catalog import find_pair
from peagle.catalog.pair import DrafterSource, Pair
from peagle.catalog.tuned import machine_of, read_tuned, tuned_path
from peagle.core import Method
from peagle.errors import UserError
from peagle.pull import pull
from peagle.server.engines.method_choice import LOW_CONCURRENCY, choose_method
from peagle.server.http.errors import ApiError, from_validation
from peagle.server.http.logs import log_event
from peagle.server.http.schema import Extension
from peagle.server.settings import ServerSettings
from peagle.server.workers.launch_spec import LaunchSpec
from peagle.server.workers.vllm_command import vllm_arguments, vllm_environment
from peagle.server.workers.vllm_drafter import (
    drafter_method,
    is_speculators,
    prepare_drafter,
    read_config,
)
from peagle.server.workers.vllm_version import VllmInstallation, find_vllm
from peagle.server.workers.worker import Worker
from peagle.server.workers.worker_status import parse_vllm_metrics

# Once vLLM reports itself unhealthy, its engine is dead.
UNHEALTHY_TIMEOUT_SECONDS = 3.0


class VllmKind:
    status_path = "/metrics"

    def __init__(
        self,
        settings: ServerSettings,
        find_installation: Callable[[str | None], VllmInstallation] = find_vllm,
    ) -> None:
        self.settings = settings
        self.method: Method = settings.method or "none"
        self.k = 0
        self._find_installation = find_installation

    def launch_specs(self, folder: Path) -> Sequence[LaunchSpec]:
        """Refuse what this vLLM does not support before anything is started."""
        settings = self.settings
        installation = self._find_installation(settings.vllm_python)
        if settings.device == "cpu" and not installation.is_cpu_build:
            raise UserError(
                f"`device` is cpu, but the vLLM of {installation.python} is built for GPUs: name"
                " another interpreter with `vllm_python`"
            )
        pair = find_served_pair(settings)
        target_pair = find_pair(settings.target) if settings.target else pair
        (self.method, _), _ = choose_method(settings, pair)
        target = pull(target_pair)
        drafter = self._prepare_drafter(pair, target, installation)
        socket = folder / "vllm.sock"
        config = self.speculative_config(drafter)
        arguments = vllm_arguments(settings, installation, target, socket, config)
        log_event(
            "vLLM",
            version=installation.version_text,
            python=installation.python,
            method=self.method,
            k=self.k,
        )
        return [
            LaunchSpec(
                "vllm",
                command=(installation.python, *arguments),
                environment=vllm_environment(installation, settings, self.method),
                socket=socket,
                unhealthy_timeout=UNHEALTHY_TIMEOUT_SECONDS,
            )
        ]

    def _prepare_drafter(
        self, pair: Pair, target: Path, installation: VllmInstallation
    ) -> Path | None:
        """Check that vLLM supports the drafter, set K, and return the drafter's folder."""
        source = pair.drafter(self.method) if self.method != "none" else None
        folder = source.folder if source is not None else None
        speculators = folder is not None and is_speculators(read_config(folder))
        model_type = str(read_config(target).get("model_type", ""))
        for warning in installation.check(self.method, speculators, model_type):
            log_event(warning, logging.WARNING)
        if source is None:
            return None
        self.k = self.choose_k(pair)
        dtype = self.settings.dtype
        return prepare_drafter(pair.name, self.method, source, target, dtype, self.k)

    def choose_k(self, pair: Pair) -> int:
        """Return the fixed K that vLLM runs with."""
        if isinstance(self.settings.k, int):
            return self.settings.k
        best = pair.best(LOW_CONCURRENCY)
        k = best.k if best.method == self.method and best.k else pair.k
        log_event("vLLM has no automatic K: using the pair's K", k=k)
        return k

    def speculative_config(self, drafter: Path | None) -> dict[str, Any]:
        """Return vLLM's speculative config, with every key set that vLLM would otherwise guess."""
        if drafter is None:
            return {}
        return {
            **self.settings.vllm_speculative,
            "method": "eagle3",
            "model": str(drafter),
            "num_speculative_tokens": self.k,
            "parallel_drafting": self.method == "p-eagle",
        }

    def prepare_body(self, body: dict[str, Any]) -> dict[str, Any]:
        """Remove the `peagle` extension, which may only ask for what this server runs with."""
        if body.get("peagle") is None:
            return body
        try:
            extension = Extension.model_validate(body["peagle"])
        except ValidationError as error:
            raise from_validation(error) from error
        if extension.method not in (None, self.method):
            raise ApiError(
                400,
                f"peagle.method {extension.method!r} is not served: this server has {self.method}",
            )
        if extension.k not in (None, "auto", self.k):
            raise ApiError(
                400, f"peagle.k {extension.k} is not supported: vLLM runs with K {self.k}"
            )
        rest = {name: value for name, value in body.items() if name != "peagle"}
        return with_token_counts(rest) if extension.trace and body.get("stream") else rest

    def status(self, responses: Mapping[Worker, httpx.Response]) -> dict[str, Any]:
        engines = {}
        for response in responses.values():  # of the only worker
            engines[self.method] = parse_vllm_metrics(response.text) | {
                "k": self.k,
                "k_reason": "vLLM's K is fixed",
            }
        return {"methods": [self.method], "method": self.method, "k": self.k, "engines": engines}


def with_token_counts(body: dict[str, Any]) -> dict[str, Any]:
    """Ask for token counts in every chunk: they replace the trace of steps, which vLLM lacks."""
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        return body  # vLLM reports the error
    return body | {
        "stream_options": options | {"include_usage": True, "continuous_usage_stats": True}
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
