"""How a server is set up: every choice of `peagle serve`, checked before anything is loaded."""

from dataclasses import dataclass

from peagle.catalog import DEFAULT_PAIR
from peagle.core import Method, check_k, parse_method
from peagle.errors import UserError, nearest

ENGINES = ["native", "vllm"]


@dataclass(frozen=True, slots=True)
class Settings:
    pair: str = DEFAULT_PAIR
    target: str | None = None
    drafter: str | None = None  # folders, by commas
    device: str = "auto"
    dtype: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    method: Method | None = None  # None: the pair's
    k: int | str = "auto"
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
    max_body: int = 25 << 20  # bytes
    timeout: float = 600.0  # seconds an answer may take; 0: no limit
    body_timeout: float = 60.0  # seconds until a request's body is there
    drain_seconds: float = 25.0
    backoff: float = 1.0  # seconds before an engine that died is made again; doubled each time
    log_prompts: bool = False

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
            "--served-model-name must not be empty: leave it out": all(self.names),
        }
        for rule, holds in rules.items():
            if not holds:
                raise UserError(rule)

    @property
    def model_names(self) -> tuple[str, ...]:
        """What a request may call the model; answers use the first."""
        if self.names:
            return self.names
        from peagle.catalog import find, names

        hub = find(self.pair).target.hub if self.pair in names() and self.target is None else None
        return (self.pair, hub) if hub else (self.pair,)

    @property
    def open_to_all(self) -> bool:
        """Others than this machine can reach it, and no key is asked for."""
        return not self.api_keys and self.host not in ("127.0.0.1", "localhost", "::1")


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
    return tuple(dict.fromkeys(parse_method(word.strip()) for word in words.split(","))) if words else ()


def check_engine(word: str) -> None:
    if word == "vllm":
        raise UserError("--engine vllm is not there yet: use --engine native, or `peagle export` and vllm serve")
    if word != "native":
        raise UserError(f"unknown engine {word!r}: use native.{nearest(word, ENGINES)}")
