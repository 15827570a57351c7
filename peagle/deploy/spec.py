"""Deployment: everything that decides how a pair is served, independent of the platform.

The templates only write it down.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from peagle.catalog.entry import check_flags
from peagle.core import Method
from peagle.errors import UserError

DEFAULT_IMAGE = "vllm/vllm-openai"
MODEL_MOUNT = "/models"
# The home of `peagle serve` in its image, which its user may write to (deploy/docker).
NATIVE_MOUNT = "/var/lib/peagle"
LEARN_KINDS = ("compose", "kubernetes")
LEARN_GB = 10  # stored answers, and versions of the drafter
NAME_PATTERN = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
IMAGE_PATTERN = re.compile(r"[\w.:/@-]+:[\w.-]+")
GPU_MEMORY_UTILIZATION = 0.9  # the default of vLLM


@dataclass(frozen=True, slots=True)
class Deployment:
    pair: str
    target: str  # a hub id, or a folder in `model_mount`
    drafter: str  # likewise
    method: Method
    k: int
    vllm: str
    local_drafter: bool = False  # in `drafter/` beside the files, mounted as `drafter`
    target_folder: str | None = None  # folder of this machine, mounted as `target`
    context: int | None = None
    gpus: int = 1  # GPUs of each replica (tensor parallel)
    gpu: str | None = None  # GPU type
    replicas: int = 1
    port: int = 8000
    name: str = ""
    served_model_name: str = ""
    custom_image: str | None = None  # replaces DEFAULT_IMAGE at the version
    learn: bool = False  # `peagle serve --learn` in `custom_image` instead of vLLM
    flags: Mapping[str, Any] = field(default_factory=dict)
    weights_gb: float | None = None
    # GPU memory of a replica, over all its GPUs, for one request of the full context.
    need_gb: float | None = None
    notes: tuple[str, ...] = ()  # warnings for the user

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or f"peagle-{dns_label(self.pair)}")
        object.__setattr__(self, "served_model_name", self.served_model_name or self.pair)
        self._check_fields()
        if not re.fullmatch(r"\S+", self.served_model_name):
            raise UserError(
                f"`served_model_name` {self.served_model_name!r} is not valid:"
                " give one without spaces"
            )
        if not IMAGE_PATTERN.fullmatch(self.image):
            raise UserError(f"`image` {self.image!r} has no version: give NAME:TAG")
        self._check_printable()
        self._check_learning()
        check_flags(self.flags, "`flags`")

    def _check_fields(self) -> None:
        context_valid = self.context is None or self.context >= 2
        rules = (
            ("gpus", self.gpus >= 1, "must be 1 or more"),
            ("replicas", self.replicas >= 1, "must be 1 or more"),
            ("port", 1024 <= self.port <= 65535, "must be in 1024..65535"),
            ("context", context_valid, "must be 2 or more"),
            ("gpu", re.fullmatch(r"[\w.-]*", self.gpu or ""), "must be the name of a GPU type"),
            (
                "name",
                NAME_PATTERN.fullmatch(self.name),
                "must consist of a-z, 0-9 and dashes, at most 40 characters",
            ),
            # Kubernetes sets VLLM_PORT and other variables for a Service named `vllm`; vLLM would
            # read them as its own settings.
            (
                "name",
                not self.name.startswith("vllm"),
                "must not be or begin with vllm: Kubernetes would set variables that vLLM reads",
            ),
        )
        for name, valid, rule in rules:
            if not valid:
                raise UserError(f"`{name}` {rule}; it is {getattr(self, name)!r}")

    def _check_learning(self) -> None:
        if not self.learn:
            return
        if self.custom_image is None:
            raise UserError(
                "`learn` needs an image with `peagle serve`: build deploy/docker/Dockerfile.cuda,"
                " and give its name with `image`"
            )
        if self.gpus > 1:
            raise UserError("`learn` needs the native engine, which uses one GPU: set `gpus` to 1")
        if self.replicas > 1:
            raise UserError("each server that learns needs a volume of its own: use `replicas` 1")

    def _check_printable(self) -> None:
        names = (self.pair, self.served_model_name, self.target, self.drafter)
        for name in (*names, self.target_folder or ""):
            if not name.isprintable():
                raise UserError(f"{name!r} contains control characters: rename it")

    @property
    def image(self) -> str:
        return self.custom_image or f"{DEFAULT_IMAGE}:v{self.vllm}"

    @property
    def model_mount(self) -> str:
        """Where the volume with weights, and with what was learned, is mounted."""
        return NATIVE_MOUNT if self.learn else MODEL_MOUNT

    @property
    def command(self) -> list[str]:
        return ["peagle", "serve"] if self.learn else ["vllm", "serve"]

    @property
    def key_variable(self) -> str:
        """The environment variable of the API key."""
        return "PEAGLE_API_KEY" if self.learn else "VLLM_API_KEY"

    @property
    def local(self) -> bool:
        """Whether a folder of this machine has to be mounted."""
        return self.local_drafter or self.target_folder is not None

    @property
    def speculative_config(self) -> dict[str, Any]:
        """vLLM's speculative config, always with all four keys.

        Without `method`, vLLM guesses it from the path; without `parallel_drafting`, it drafts
        one token after another.
        """
        return {
            "method": "eagle3",
            "model": self.drafter,
            "num_speculative_tokens": self.k,
            "parallel_drafting": self.method == "p-eagle",
        }

    @property
    def options(self) -> dict[str, Any]:
        """Options of `command` and its target, without host and port; True is a bare flag."""
        if self.learn:
            return self.learn_options
        options: dict[str, Any] = {
            "served-model-name": self.served_model_name,
            "tensor-parallel-size": self.gpus,
        }
        if self.context is not None:
            options["max-model-len"] = self.context
        return {**options, **self.flags, "speculative-config": self.speculative_config}

    @property
    def learn_options(self) -> dict[str, Any]:
        """The pair's own drafter is in the image, and K adapts to the load."""
        options: dict[str, Any] = {"served-model-name": self.served_model_name}
        if self.context is not None:
            options["max-model-len"] = self.context
        if self.local_drafter:
            options["drafter"] = self.drafter
        return options | {"method": self.method, "learn": f"{NATIVE_MOUNT}/learn"}

    @property
    def arguments(self) -> list[str]:
        """The command line after `command`."""
        return [self.target, "--host=0.0.0.0", f"--port={self.port}", *self.option_arguments]

    @property
    def option_arguments(self) -> list[str]:
        return [option_argument(name, value) for name, value in self.options.items()]

    @property
    def extra_arguments(self) -> list[str]:
        """The options for which the Helm chart has no field of its own."""
        fields = ("tensor-parallel-size", "max-model-len")
        return [
            option_argument(name, value)
            for name, value in self.options.items()
            if name not in fields
        ]

    @property
    def engine_flags(self) -> dict[str, Any]:
        """The pair's own options as engine keywords: `no-x` becomes x = False."""
        return {
            name.removeprefix("no-").replace("-", "_"): False if name.startswith("no-") else value
            for name, value in self.flags.items()
        }

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of vLLM. P-EAGLE runs only on its first model runner."""
        if self.learn:
            return {}
        runner = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if self.method == "p-eagle" else {}
        return runner | {"VLLM_NO_USAGE_STATS": "1"}

    @property
    def disk_gb(self) -> int:
        """Disk space for weights, drafter and compiled kernels, with a reserve."""
        weights = 200 if self.weights_gb is None else 20 + math.ceil(1.5 * self.weights_gb)
        return weights + (LEARN_GB if self.learn else 0)

    @property
    def host_gb(self) -> int:
        return 64 if self.weights_gb is None else max(16, math.ceil(1.25 * self.weights_gb))

    @property
    def shm_gb(self) -> int:
        """Shared memory, through which the processes of a replica exchange data."""
        return 8

    @property
    def host_limit_gb(self) -> int:
        """Memory above which a replica is killed: twice the expected use, and the shared memory."""
        return 2 * self.host_gb + self.shm_gb

    @property
    def gpu_gb(self) -> int | None:
        """Minimum memory of each GPU; None: unknown."""
        need = self.need_gb or self.weights_gb
        return None if need is None else math.ceil(need / GPU_MEMORY_UTILIZATION / self.gpus)


def option_argument(name: str, value: Any) -> str:
    if value is True:
        return f"--{name}"
    return f"--{name}={value if isinstance(value, str) else json.dumps(value)}"


def dns_label(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:30].strip("-")
