"""Settings of a server: every option of `peagle serve`, checked before anything is loaded."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from peagle.catalog import DEFAULT_PAIR, find_pair, pair_names
from peagle.core import Method
from peagle.draft_shape import check_tree_nodes, check_window
from peagle.errors import UserError

EngineKind = Literal["native", "vllm"]
ENGINES: tuple[EngineKind, ...] = get_args(EngineKind)
# Options that the server itself sets for vLLM, or must handle instead of vLLM.
RESERVED_VLLM_OPTIONS = (
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
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
MIN_KV_TOKENS = 64
MAX_PROCESSES = 256  # Engine processes, or web servers: more are a mistake.


@dataclass(frozen=True, slots=True)
class ServerSettings:
    pair: str = DEFAULT_PAIR
    target: str | None = None
    drafter: str | None = None  # folders, separated by commas
    device: str = "auto"
    dtype: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    method: Method | None = None  # None: the pair's
    k: int | str = "auto"
    # Nodes of a draft tree, the maximum for adaptive drafting; 0: chains; None: the engine decides.
    tree: int | None = None
    # N-gram drafts beside those of the drafter; None: the engine decides.
    ngram: bool | None = None
    # Sliding window of the drafter; 0: none; None: as its config says.
    drafter_window: int | None = None
    methods: tuple[Method, ...] = ()  # that a request may choose; (): all of the pair
    parallel_drafting: bool | None = None  # of the speculative config; None: not given
    max_batch: int = 64
    max_queue: int = 1024
    kv_tokens: int | None = None
    context: int | None = None
    chunk: int | None = None  # maximum number of prompt tokens in one step
    int8: bool = False
    exact: bool | None = None  # None: where it costs little, the engine decides
    prefix_caching: bool = True
    graphs: bool = True
    served_model_names: tuple[str, ...] = ()  # (): the pair's
    api_keys: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()  # of web pages that may use a server without keys
    max_body_mb: float = 25
    timeout: float = 600.0  # seconds for a whole answer; 0: no limit
    body_timeout: float = 60.0  # seconds to receive the body of a request
    # Seconds of one step after which the engine process is replaced; 0: no limit.
    step_timeout: float = 300.0
    drain_seconds: float = 25.0
    backoff: float = 1.0  # seconds before the first restart of a failed engine; then doubled
    log_prompts: bool = False
    tool_parser: str | None = None  # Format of tool calls; None: by the chat template.
    reasoning_parser: str | None = None  # Format of reasoning, or none; None: likewise.
    engine: EngineKind = "native"
    replicas: int | None = None  # engine processes, each with a device of its own; None: one
    http_workers: int = 1  # web server processes that share the engine processes
    vllm_python: str | None = None  # interpreter that has vLLM; None: search for it
    vllm_arguments: tuple[str, ...] = ()  # passed on to vLLM unchanged
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    trust_remote_code: bool = False
    learn: str | None = None  # folder to learn from answers; None: off
    learn_share: float = 1.0  # fraction of the answered requests that is stored
    learn_size: float = 1024.0  # MB of stored requests
    learn_days: float = 30.0  # after which stored requests are deleted
    learn_opt_out: tuple[str, ...] = ()  # users or API keys whose requests are not stored
    # Fraction of time for the trainer while requests run; None: 0 on a CPU, 0.1 on a GPU.
    learn_time: float | None = None
    learn_memory: float = 8.0  # GiB of a GPU's memory that the KV cache leaves to the trainer
    learn_replay: str | None = None  # folder of regenerated answers that are trained on too
    # Keys of the speculative config that only vLLM reads.
    vllm_speculative: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_tree_nodes(self.tree or 0, (self.k,), self.method)
        check_window(self.drafter_window or None, "drafter_window")
        self._check_common()
        self._check_learning()
        if self.engine == "vllm":
            self._check_vllm()
        else:
            self._check_native()

    def _check_common(self) -> None:
        require(0 <= self.port <= 65535, "`port` must be in 0..65535")
        require(self.max_batch >= 1, "`max_batch` must be 1 or more")
        require(self.max_queue >= 1, "`max_queue` must be 1 or more")
        require(
            self.kv_tokens is None or self.kv_tokens >= MIN_KV_TOKENS,
            f"`kv_tokens` must be {MIN_KV_TOKENS} or more",
        )
        require(self.context is None or self.context >= 2, "`context` must be 2 or more")
        require(self.chunk is None or self.chunk >= 1, "`chunk` must be 1 or more")
        require(
            1 <= self.http_workers <= MAX_PROCESSES,
            f"`http_workers` must be in 1..{MAX_PROCESSES}",
        )
        require(self.max_body_bytes > 0, "`max_body_mb` must be above 0")
        require(0 <= self.timeout < float("inf"), "`timeout` must be 0 (no limit) or more")
        require(
            0 <= self.step_timeout < float("inf"), "`step_timeout` must be 0 (no limit) or more"
        )
        require(0 <= self.drain_seconds < float("inf"), "`drain_seconds` must be 0 or more")
        require(all(self.api_keys), "`api_keys` must not be empty: leave it out")
        require(
            all("://" in origin for origin in self.allow_origins),
            "`allow_origins` must be like https://example.org",
        )
        require(
            all(self.served_model_names), "`served_model_names` must not be empty: leave it out"
        )

    def _check_learning(self) -> None:
        if self.learn is None:
            given = self.learn_opt_out or self.learn_time is not None or self.learn_replay
            require(not given, "`learn_opt_out`, `learn_time` and `learn_replay` need `learn`")
            return
        require(bool(self.learn), "`learn` must name a folder")
        require(
            self.engine == "native",
            "`learn` is not supported with `engine` vllm: leave it out, or use `engine` native",
        )
        require(
            self.method not in ("none", "ngram"),
            f"`learn` trains a drafter, and `method` {self.method} has none: leave out one of them",
        )
        require(0 < self.learn_share <= 1, "`learn_share` must be above 0 and at most 1")
        require(1 <= self.learn_size < float("inf"), "`learn_size` must be 1 (MB) or more")
        require(0 < self.learn_days < float("inf"), "`learn_days` must be above 0")
        require(all(self.learn_opt_out), "`learn_opt_out` must not be empty: leave it out")
        require(self.learn_time is None or 0 <= self.learn_time <= 1, "`learn_time` must be 0 to 1")
        require(0 <= self.learn_memory < float("inf"), "`learn_memory` must be 0 or more")

    def _check_vllm(self) -> None:
        reserved = " ".join(word for word in self.vllm_arguments if is_reserved(word))
        require(
            not reserved,
            f"{reserved} must not be passed on to vLLM: give it to peagle serve, or leave it out",
        )
        native = "or use `engine` native"
        require(
            not self.int8,
            f"`int8` is not supported by vLLM: pass it its own --quantization, {native}",
        )
        require(not self.exact, f"`exact` is not supported by vLLM: use `dtype` float32, {native}")
        self._check_vllm_drafting(native)
        require(
            self.kv_tokens is None,
            "`kv_tokens` is not supported by vLLM: pass it its own --gpu-memory-utilization",
        )
        require(
            self.device in ("auto", "cpu", "cuda"),
            "`device` must be auto, cpu or cuda with `engine` vllm: choose GPUs with"
            " CUDA_VISIBLE_DEVICES",
        )
        require(
            self.http_workers == 1,
            "`http_workers` needs `engine` native: leave it out",
        )
        require(
            self.tool_parser is None and self.reasoning_parser is None,
            "`tool_parser` and `reasoning_parser` are not supported by vLLM: pass it its own"
            " --tool-call-parser and --reasoning-parser",
        )
        require(self.replicas is None, "`replicas` needs `engine` native: use `data_parallel` N")
        require(
            min(self.tensor_parallel, self.pipeline_parallel, self.data_parallel) >= 1,
            "`tensor_parallel`, `pipeline_parallel` and `data_parallel` must be 1 or more",
        )

    def _check_vllm_drafting(self, native: str) -> None:
        require(
            not self.tree,
            "`tree` is not supported by vLLM, whose parallel_drafting drafts chains:"
            f" leave it out, {native}",
        )
        require(
            self.method != "ngram" and not self.ngram,
            f"n-gram drafts are not supported with vLLM here: leave out `ngram`, {native}",
        )
        require(
            self.drafter_window is None,
            "`drafter_window` is not supported by vLLM, which reads the window of the drafter's"
            " config.json: leave it out, and export the drafter with a window",
        )
        require(
            not self.methods,
            "`methods` is not supported by vLLM: it serves one method, `method`",
        )

    def _check_native(self) -> None:
        require(
            not self.trust_remote_code,
            "`trust_remote_code` is not supported: the native engine never runs code from a"
            " checkpoint",
        )
        one_device = (
            "the native engine runs on one device: use `engine` vllm, or `replicas` N for N engines"
        )
        require(
            self.tensor_parallel == 1,
            f"`tensor_parallel` {self.tensor_parallel} is not supported: {one_device}",
        )
        require(
            self.pipeline_parallel == 1,
            f"`pipeline_parallel` {self.pipeline_parallel} is not supported: {one_device}",
        )
        require(
            self.data_parallel == 1,
            f"`data_parallel` {self.data_parallel} is not supported: use `replicas` N",
        )
        require(
            self.vllm_python is None and not self.vllm_arguments,
            "`vllm_python` and arguments for vLLM need `engine` vllm",
        )
        require(
            self.replicas is None or 1 <= self.replicas <= MAX_PROCESSES,
            f"`replicas` must be in 1..{MAX_PROCESSES}",
        )

    @property
    def receive_seconds(self) -> float:
        """Time to receive a request: its headers, then its body; and to take data of an answer."""
        return min(self.body_timeout, self.timeout or self.body_timeout)

    def share_of_front(self, limit: int) -> int:
        """What each of the web server processes may have of a limit of the whole server."""
        return max(1, limit // self.http_workers)

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * (1 << 20))

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names by which a request may call the model; answers use the first."""
        if self.served_model_names:
            return self.served_model_names
        hub = (
            find_pair(self.pair).target.hub
            if self.pair in pair_names() and self.target is None
            else None
        )
        return (self.pair, hub) if hub else (self.pair,)

    @property
    def is_open_to_network(self) -> bool:
        """Whether other machines can use the server without a key."""
        return not self.api_keys and self.host not in LOOPBACK_HOSTS


def settings_from_json(text: str) -> ServerSettings:
    """The settings that `dataclasses.asdict` and `json.dumps` wrote."""
    values = json.loads(text)
    tuples = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return ServerSettings(**values | tuples)


def require(holds: bool, message: str) -> None:
    if not holds:
        raise UserError(message)


def is_reserved(word: str) -> bool:
    """Return whether vLLM would read `word` as a reserved option.

    vLLM also accepts underscores and unique prefixes: --api_key=x, --api-k.
    """
    option = word.partition("=")[0].replace("_", "-")
    return len(option) > 2 and any(known.startswith(option) for known in RESERVED_VLLM_OPTIONS)
