"""How a server is set up: every choice of `peagle serve`, checked before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from peagle.catalog import DEFAULT_PAIR
from peagle.core import Method, check_k, parse_method
from peagle.draft_shape import check_tree_nodes
from peagle.errors import UserError, did_you_mean

EngineKind = Literal["native", "vllm"]
FRONTS = (  # options of vLLM's that the front must have the say of
    "--model",
    "--served-model-name",
    "--api-key",
    "--host",
    "--port",
    "--uds",
    "--root-path",
    "--ssl-keyfile",
    "--ssl-certfile",
    "--ssl-ca-certs",
)
ENGINES: tuple[EngineKind, ...] = get_args(EngineKind)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    pair: str = DEFAULT_PAIR
    target: str | None = None
    drafter: str | None = None  # folders, by commas
    device: str = "auto"
    dtype: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    method: Method | None = None  # None: the pair's
    k: int | str = "auto"
    tree: int | None = (
        None  # nodes: the most with automatic K; 0: chains only; None: as the engine thinks fit
    )
    methods: tuple[Method, ...] = ()  # that a request may choose; (): all that the pair has
    parallel: bool | None = None  # what a speculative config said of its drafter; None: nothing
    max_batch: int = 64
    max_queue: int = 1024
    kv_tokens: int | None = None
    context: int | None = None
    chunk: int | None = None
    int8: bool = False
    exact: bool = False
    prefix_caching: bool = True
    graphs: bool = True
    names: tuple[str, ...] = ()  # of the model; (): the pair's
    api_keys: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()  # of web pages that may ask though no key is asked for
    max_body: int = 25 << 20  # bytes
    timeout: float = 600.0  # seconds an answer may take; 0: no limit
    body_timeout: float = 60.0  # seconds until a request's body is there
    drain_seconds: float = 25.0
    backoff: float = 1.0  # seconds before an engine that died is made again; doubled each time
    log_prompts: bool = False
    engine: EngineKind = "native"
    replicas: int | None = (
        None  # processes with a native engine each; None: the engine is in this process
    )
    socket: str | None = None  # a Unix socket to listen on, instead of host and port
    vllm_python: str | None = None  # the interpreter that has vLLM; None: looked for
    vllm_arguments: tuple[str, ...] = ()  # as they are
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    trust_remote_code: bool = False
    speculative: Mapping[str, Any] = field(
        default_factory=dict
    )  # further keys of vLLM's speculative config

    def __post_init__(self) -> None:
        rules = {
            "--port must be in 0..65535": 0 <= self.port <= 65535,
            "--max-batch must be 1 or more": self.max_batch >= 1,
            "--max-queue must be 1 or more": self.max_queue >= 1,
            "--kv-tokens must be 64 or more": self.kv_tokens is None or self.kv_tokens >= 64,
            "--context must be 2 or more": self.context is None or self.context >= 2,
            "--max-body-mb must be above 0": self.max_body > 0,
            "--timeout must be 0 (no limit) or more": 0 <= self.timeout < float("inf"),
            "--drain-seconds must be 0 or more": 0 <= self.drain_seconds < float("inf"),
            "--api-key must not be empty: leave it out": all(self.api_keys),
            "--allow-origin must be like https://example.org": all(
                "://" in origin for origin in self.allow_origins
            ),
            "--served-model-name must not be empty: leave it out": all(self.names),
        }
        check_tree_nodes(self.tree or 0, (self.k,), self.method, self.exact)
        rules |= self._vllm_rules() if self.engine == "vllm" else self._native_rules()
        for rule, holds in rules.items():
            if not holds:
                raise UserError(rule)

    def _vllm_rules(self) -> dict[str, bool]:
        taken = [word for word in self.vllm_arguments if is_fronts(word)]
        return {
            f"{' '.join(taken)} must not stand behind --: give it to peagle serve, or leave it out": not taken,
            "--int8 cannot be had from vLLM: use -- --quantization ..., or --engine native": not self.int8,
            "--exact cannot be had from vLLM: use --dtype float32, or --engine native": not self.exact,
            "--tree cannot be had from vLLM: its parallel_drafting drafts chains. Leave it out, or --engine native": not self.tree,
            "--methods cannot be had from vLLM: it serves one method, --method": not self.methods,
            "--kv-tokens cannot be had from vLLM: use -- --gpu-memory-utilization 0.85": self.kv_tokens
            is None,
            "--device must be auto, cpu or cuda with --engine vllm: choose GPUs by CUDA_VISIBLE_DEVICES": self.device
            in ("auto", "cpu", "cuda"),
            "--replicas is for --engine native: use --data-parallel-size N": self.replicas is None,
            "--tensor-parallel-size, --pipeline-parallel-size and --data-parallel-size must be 1 or more": min(
                self.tensor_parallel, self.pipeline_parallel, self.data_parallel
            )
            >= 1,
        }

    def _native_rules(self) -> dict[str, bool]:
        one = (
            "the native engine runs on one device: use --engine vllm, or --replicas N for N engines"
        )
        return {
            "--trust-remote-code cannot be had: the native engine never runs code from a checkpoint": not self.trust_remote_code,
            f"--tensor-parallel-size {self.tensor_parallel} cannot be had: {one}": self.tensor_parallel
            == 1,
            f"--pipeline-parallel-size {self.pipeline_parallel} cannot be had: {one}": self.pipeline_parallel
            == 1,
            f"--data-parallel-size {self.data_parallel} cannot be had: use --replicas N": self.data_parallel
            == 1,
            "--vllm-python and arguments behind -- go with --engine vllm": self.vllm_python is None
            and not self.vllm_arguments,
            "--replicas must be 1 or more": self.replicas is None or self.replicas >= 1,
        }

    @property
    def model_names(self) -> tuple[str, ...]:
        """What a request may call the model; answers use the first."""
        if self.names:
            return self.names
        from peagle.catalog import find_pair, pair_names

        hub = (
            find_pair(self.pair).target.hub
            if self.pair in pair_names() and self.target is None
            else None
        )
        return (self.pair, hub) if hub else (self.pair,)

    @property
    def open_to_all(self) -> bool:
        """Others than this machine can reach it, and no key is asked for."""
        return not self.api_keys and self.host not in ("127.0.0.1", "localhost", "::1")


def is_fronts(word: str) -> bool:
    """However it is written: --api_key=x, or cut short to --api-k."""
    option = word.partition("=")[0].replace("_", "-")
    return len(option) > 2 and any(one.startswith(option) for one in FRONTS)


def parse_serving_k(word: str) -> int | str:
    if word == "auto":
        return word
    try:
        return check_k(int(word))
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"cannot read --k {word!r}: use auto or a number") from error


def parse_methods(words: str | None) -> tuple[Method, ...]:
    return (
        tuple(dict.fromkeys(parse_method(word.strip()) for word in words.split(",")))
        if words
        else ()
    )


def parse_engine(word: str) -> EngineKind:
    for engine in ENGINES:
        if word == engine:
            return engine
    raise UserError(
        f"unknown engine {word!r}: use {' or '.join(ENGINES)}.{did_you_mean(word, list(ENGINES))}"
    )
