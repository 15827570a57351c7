"""Messages between fronts (web servers), engine processes and their supervisor, as msgpack.

    front -> worker: FrontBatch, one per turn of the event loop that has something to send
    worker -> front: WorkerBatch, one per step of the engines that has something for this front
    supervisor -> front: ServerState, whenever a process starts or ends

Requests and calls have integer ids, chosen by the front. A call has one result: `open` an engine
(a lease, until it is closed) and `score` a prompt. Text is made in front: a worker sends token
ids, and a front that finds a stop string sends an abort with the reason "stop".
"""

from typing import Any, Literal, NamedTuple

import msgspec

from peagle.core import Method
from peagle.engine.thinking import Thinking
from peagle.grammar import Grammar

LogprobEntry = tuple[int, float, int, dict[int, float]]  # token, logprob, rank, top


class EngineKey(NamedTuple):
    """What distinguishes the engines of a server."""

    method: Method
    k: int | str  # "auto": adaptive drafting; 0: no drafts


# The supervisor's end of a worker's socket has this identity; those of fronts are made by ZeroMQ.
SUPERVISOR_IDENTITY = b"supervisor"


class Message(msgspec.Struct, array_like=True, omit_defaults=True):
    pass


class ProbedGrammar(Message):
    """A grammar that the probe has accepted; `probed` is to be compiled in its place."""

    grammar: Grammar
    probed: Grammar
    memory_bytes: int


class Add(Message):
    id: int
    engine: EngineKey
    prompt: list[int]
    max_tokens: int
    sampling: dict[str, Any]
    min_tokens: int = 0
    stop_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    grammar: ProbedGrammar | None = None
    user: str = ""
    cache_salt: str = ""
    thinking: Thinking | None = None
    learn: bool = False  # Whether the request and its answer may be stored.


class Abort(Message):
    id: int
    reason: Literal["abort", "stop"] = "abort"


class Call(Message):
    id: int
    kind: Literal["open", "score"]
    engine: EngineKey = EngineKey("none", 0)
    prompt: list[int] = []
    top: int = 0


class FrontBatch(Message):
    adds: list[Add] = []
    aborts: list[Abort] = []
    calls: list[Call] = []
    ended_calls: list[int] = []  # Calls that are canceled, and leases that are given back.
    wants_status: bool = False  # Send the status now: it is to be shown.


class Output(Message):
    """What one step adds to an answer; a request that ends has a `reason`."""

    id: int
    tokens: list[int] = []
    drafted: int = 0
    accepted: int = 0
    reason: str | None = None
    error: str | None = None
    logprobs: list[LogprobEntry] | None = None
    queued: float | None = None  # With the first tokens: seconds in the queue.
    cached_tokens: int = 0  # With the first tokens: prompt tokens found in the prefix cache.


class Refusal(Message):
    """A request or a call that failed: an HTTP status and a message."""

    id: int
    status: int
    message: str
    retry_after: int | None = None


class EngineInfo(Message):
    name: str
    context: int
    vocab_size: int


class CallResult(Message):
    id: int
    engine: EngineInfo | None = None
    scores: list[LogprobEntry] | None = None


class TargetInfo(Message):
    name: str
    folder: str  # That the tokenizer is loaded from.
    stop_ids: list[int]
    engine: EngineInfo
    key: EngineKey
    methods: list[Method]


class VersionCounts(Message):
    """What one version of the drafter did in an engine process."""

    drafts: int = 0
    accepted_tokens: int = 0


class LearnReport(Message):
    """Learning in an engine process."""

    version: int = 0  # Of the drafter that drafts; 0: the pair's own.
    drafter: str = ""  # Folder of version 0.
    failure: str | None = None  # Why nothing is stored and no version is loaded.
    failed_version: int | None = None  # The current version, if it cannot be loaded.
    version_failure: str | None = None
    documents: int = 0  # Stored by this process.
    tokens: int = 0
    dropped: int = 0
    store_failure: str | None = None  # Why the last document was not written.
    versions: dict[int, VersionCounts] = {}


class WorkerStatus(Message):
    """Sent twice a second at most, and on request: the source of /metrics and of the status."""

    target: TargetInfo | None = None
    failure: str | None = None  # The model can never be served.
    engines: dict[str, dict[str, Any]] = {}
    counts: dict[str, dict[str, int]] = {}  # By engine name, closed engines included.
    scorings: int = 0  # Prompts whose own log-probabilities are computed or waited for.
    pid: int = 0
    learn: LearnReport | None = None  # None: the server does not learn.


class WorkerBatch(Message):
    outputs: list[Output] = []
    accepted: list[int] = []
    refusals: list[Refusal] = []
    results: list[CallResult] = []
    status: WorkerStatus | None = None


class EngineState(Message):
    """One engine process, as its supervisor knows it."""

    name: str
    address: str  # Of the process that runs, or ran last; each process has its own.
    running: bool
    restarts: int = 0
    counts: dict[str, dict[str, int]] = {}  # Of the processes that have ended.


class ServerState(Message):
    engines: list[EngineState] = []


encode = msgspec.msgpack.Encoder().encode
decode_front = msgspec.msgpack.Decoder(FrontBatch).decode
decode_worker = msgspec.msgpack.Decoder(WorkerBatch).decode
decode_state = msgspec.msgpack.Decoder(ServerState).decode
