"""A worker that is vLLM's own API server: its command line and environment, from our settings."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from peagle.catalog import find as find_pair
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
from peagle.server.workers.vllm_drafter import config_of, exported, is_speculators, method_of
from peagle.server.workers.vllm_version import TOLD, VllmInstallation, find
from peagle.server.workers.worker import Launch, Worker, inherited
from peagle.server.workers.worker_status import from_vllm

UNWELL = 3.0  # seconds: once it says 503 of itself, its engine is dead
CPU_SPACE = "4"  # GiB of keys and values on a CPU, unless the environment says otherwise


class Vllm:
    status_path = "/metrics"

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.method: Method = settings.method or "none"
        self.k = 0

    def launches(self, folder: Path) -> Sequence[Launch]:
        """What this vLLM cannot do is refused before anything is fetched or started."""
        how = self.settings
        installed = find(how.vllm_python)
        if how.device == "cpu" and not installed.cpu:
            raise UserError(
                f"--device cpu: the vLLM of {installed.python} is built for GPUs: name one that is not"
            )
        pair, target = resolved(how), find_pair(how.target) if how.target else None
        (self.method, _), _ = choose_method(how, pair)
        place = pull(target or pair)
        source = pair.drafter(self.method) if self.method != "none" else None
        speculators = (
            source is not None
            and source.folder is not None
            and is_speculators(config_of(source.folder))
        )
        model_type = str(config_of(place).get("model_type", ""))
        for line in installed.check(self.method, speculators, model_type):
            log_event(line, logging.WARNING)
        drafter = None
        if source is not None:
            self.k = self._fixed_k(pair)
            drafter = exported(pair.name, self.method, source, place, how.dtype, self.k)
        socket = folder / "vllm.sock"
        command = (
            installed.python,
            *arguments(how, installed, place, socket, self._speculative(drafter)),
        )
        log_event(
            "vLLM", version=installed.text, python=installed.python, method=self.method, k=self.k
        )
        return [Launch("vllm", command, environment(installed, how, self.method), socket, UNWELL)]

    def _fixed_k(self, pair: Pair) -> int:
        if isinstance(self.settings.k, int):
            return self.settings.k
        best = pair.best(LOW_CONCURRENCY)
        k = best.k if best.method == self.method and best.k else pair.k
        log_event("vLLM has no automatic K: the pair's is used; -k sets another", k=k)
        return k

    def _speculative(self, drafter: Path | None) -> dict[str, Any]:
        """All four keys: none is left to be guessed."""
        if drafter is None:
            return {}
        own = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": self.k}
        return (
            dict(self.settings.speculative) | own | {"parallel_drafting": self.method == "p-eagle"}
        )

    def passed_on(self, body: dict[str, Any]) -> dict[str, Any]:
        """Without our extension, which must ask for nothing but what is served."""
        if body.get("peagle") is None:
            return body
        try:
            asked = Extension.model_validate(body["peagle"])
        except ValidationError as error:
            raise from_validation(error) from error
        if asked.method not in (None, self.method):
            raise ApiError(
                400, f"peagle.method {asked.method!r} is not served: this server has {self.method}"
            )
        if asked.k not in (None, "auto", self.k):
            raise ApiError(400, f"peagle.k {asked.k} cannot be had: vLLM runs with K {self.k}")
        rest = {name: value for name, value in body.items() if name != "peagle"}
        return traced(rest) if asked.trace and body.get("stream") else rest

    def status(self, replies: Mapping[Worker, httpx.Response]) -> dict[str, Any]:
        engines = {}
        for reply in replies.values():  # there is one
            engines[self.method] = from_vllm(reply.text) | {
                "k": self.k,
                "k_reason": "vLLM's K is fixed",
            }
        return {"methods": [self.method], "method": self.method, "k": self.k, "engines": engines}


def traced(body: dict[str, Any]) -> dict[str, Any]:
    """vLLM does not tell its steps, but counts the tokens along: chunks hold several."""
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        return body  # vLLM says what is wrong with it
    return body | {
        "stream_options": options | {"include_usage": True, "continuous_usage_stats": True}
    }


def resolved(how: ServerSettings) -> Pair:
    """The pair with the drafter that was asked for, and what was tuned where it is the pair's own."""
    pair = find_pair(how.pair)
    if how.drafter is not None:
        folder = Path(how.drafter).expanduser()
        if not folder.is_dir():
            raise UserError(
                f"no drafter in {how.drafter}: there is no such folder (vLLM takes one)"
            )
        method = method_of(config_of(folder))
        return replace(pair, method=method, drafters={method: DrafterSource(folder=folder)})
    if how.target is None and tuned_path(pair).is_file():
        from peagle.model_pair import choose_device
        from peagle.target.precision import choose_dtype

        device = choose_device(how.device)
        return replace(
            pair,
            k_by_concurrency=read_tuned(pair, machine_of(device, choose_dtype(how.dtype, device))),
        )
    return pair


def arguments(
    how: ServerSettings,
    installed: VllmInstallation,
    target: Path,
    socket: Path,
    speculative: dict[str, Any],
) -> list[str]:
    """Behind the interpreter. What the user added comes last: it has the last word."""
    words = [
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(target),
        "--uds",
        str(socket),
    ]
    words += [
        "--served-model-name",
        *how.model_names,
        "--max-num-seqs",
        str(how.max_batch),
        "--dtype",
        how.dtype,
    ]
    words += ["--enable-prefix-caching" if how.prefix_caching else "--no-enable-prefix-caching"]
    words += ["--disable-uvicorn-access-log"]
    if speculative and installed.version >= TOLD:
        words += ["--per-request-spec-decode-metrics", "summary"]
    for option, value in {
        "--max-model-len": how.context,
        "--max-num-batched-tokens": how.chunk,
        "--tensor-parallel-size": how.tensor_parallel,
        "--pipeline-parallel-size": how.pipeline_parallel,
        "--data-parallel-size": how.data_parallel,
    }.items():
        if value is not None and (value > 1 or not option.endswith("-parallel-size")):
            words += [option, str(value)]
    words += ["--enforce-eager"] * (not how.graphs) + [
        "--trust-remote-code"
    ] * how.trust_remote_code
    if speculative:
        words += ["--speculative-config", json.dumps(speculative)]
    return [*words, *how.vllm_arguments]


def environment(installed: VllmInstallation, how: ServerSettings, method: Method) -> dict[str, str]:
    """The user's own has the last word; but P-EAGLE runs on the first runner only."""
    usual = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if installed.cpu or how.device == "cpu":
        usual["VLLM_CPU_KVCACHE_SPACE"] = CPU_SPACE
    needed = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if method == "p-eagle" else {}
    return usual | inherited() | needed
