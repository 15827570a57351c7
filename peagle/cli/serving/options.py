"""Options of `peagle serve`. Their parameters are named as the fields of ServerSettings."""

from typing import Annotated

import typer

from peagle.catalog import DEFAULT_PAIR

Pair = Annotated[
    str | None,
    typer.Argument(
        help=f"Name of a pair, or folder of a target. Default: {DEFAULT_PAIR}.", show_default=False
    ),
]
Model = Annotated[
    str | None, typer.Option("--model", help="vLLM's name of the argument PAIR.", hidden=True)
]

# The address and who may use it.
Host = Annotated[str, typer.Option("--host", help="Address to listen on. 0.0.0.0: all addresses.")]
Port = Annotated[int, typer.Option("--port", help="Port to listen on.")]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        help="API key that requests must carry. May be repeated.",
        envvar="PEAGLE_API_KEY",
        show_envvar=True,
        show_default=False,
    ),
]
AllowOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-origin",
        help="Origin of web pages that may use a server without API keys. May be repeated.",
        show_default=False,
    ),
]
ServedModelNames = Annotated[
    list[str] | None,
    typer.Option(
        "--served-model-name",
        help="Name of the model in requests. May be repeated. Default: the pair's.",
        show_default=False,
    ),
]

# Drafting.
K = Annotated[
    str,
    typer.Option("-k", "--k", help="Number of tokens to draft; auto adapts it to the load."),
]
TreeNodes = Annotated[
    int | None,
    typer.Option(
        "--tree",
        help="Nodes of draft trees, with adaptive drafting the maximum; 0: chains only."
        " Default: trees where they are faster.",
        show_default=False,
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(
        "--methods",
        help="Methods that a request may choose, separated by commas."
        " Default: none and the pair's.",
        show_default=False,
    ),
]
SpeculativeConfigJson = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        help="vLLM's JSON: drafter, method, K and tree.",
        show_default=False,
    ),
]
Drafters = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="Folders of drafters, separated by commas. Default: the pair's.",
        show_default=False,
    ),
]

# The native engine.
MaxBatch = Annotated[
    int, typer.Option("--max-batch", "--max-num-seqs", help="Maximum number of running requests.")
]
MaxQueue = Annotated[
    int, typer.Option("--max-queue", help="Maximum number of waiting requests; more get a 429.")
]
KVTokens = Annotated[
    int | None,
    typer.Option(
        "--kv-tokens",
        help="Size of the KV cache in tokens. Default: what fits into memory.",
        show_default=False,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        "--max-model-len",
        help="Maximum number of tokens of a prompt and its answer. Default: the target's.",
        show_default=False,
    ),
]
Chunk = Annotated[
    int | None,
    typer.Option(
        "--max-num-batched-tokens",
        help="Maximum number of prompt tokens in one step.",
        show_default=False,
    ),
]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Reuse the KV cache of common prompt prefixes.",
    ),
]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="Do not use CUDA graphs.")]
ToolParser = Annotated[
    str | None,
    typer.Option(
        "--tool-parser",
        "--tool-call-parser",
        help="Format of tool calls: hermes, qwen-xml, llama, mistral or harmony."
        " Default: the one of the target's chat template.",
        show_default=False,
    ),
]
ReasoningParser = Annotated[
    str | None,
    typer.Option(
        "--reasoning-parser",
        help="Format of reasoning: think-tags, or none to leave it in the content."
        " Default: the one of the target's chat template.",
        show_default=False,
    ),
]
Replicas = Annotated[
    int | None,
    typer.Option(
        "--replicas",
        help="Number of native engines, each in a process and on a GPU of its own.",
        show_default=False,
    ),
]
HttpWorkers = Annotated[
    int | None,
    typer.Option(
        "--http-workers",
        help="Number of web server processes that share the engines, for many streams at once."
        " Default: 1; beside a GPU one per 4 CPU cores, up to 4.",
        show_default=False,
    ),
]

# vLLM as the engine.
Engine = Annotated[
    str, typer.Option("--engine", help="native, or vllm behind the same HTTP server.")
]
VllmPython = Annotated[
    str | None,
    typer.Option(
        "--vllm-python",
        help="Python interpreter that has vLLM.",
        envvar="PEAGLE_VLLM_PYTHON",
        show_envvar=True,
        show_default=False,
    ),
]
VllmArguments = Annotated[
    list[str] | None,
    typer.Option("--vllm-argument", help="One word of vLLM's command line.", hidden=True),
]
TensorParallel = Annotated[
    int, typer.Option("--tensor-parallel-size", help="vLLM: number of GPUs that share each layer.")
]
PipelineParallel = Annotated[
    int,
    typer.Option("--pipeline-parallel-size", help="vLLM: number of stages that share the layers."),
]
DataParallel = Annotated[
    int, typer.Option("--data-parallel-size", help="vLLM: number of copies of the model.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="vLLM only: run code from the checkpoint.")
]

# Learning from answers.
Learn = Annotated[
    str | None,
    typer.Option(
        "--learn",
        help="Folder: store answered requests there as token ids, train the drafter on them in the"
        " background, and swap in versions that win. Default: off.",
        show_default=False,
    ),
]
LearnShare = Annotated[
    float, typer.Option("--learn-share", help="Fraction of the answered requests that is stored.")
]
LearnSize = Annotated[
    float, typer.Option("--learn-size", help="Maximum size of the stored requests, in MB.")
]
LearnDays = Annotated[
    float, typer.Option("--learn-days", help="Days after which stored requests are deleted.")
]
LearnOptOut = Annotated[
    list[str] | None,
    typer.Option(
        "--learn-opt-out",
        help="User or API key whose requests are never stored. May be repeated.",
        envvar="PEAGLE_LEARN_OPT_OUT",
        show_envvar=True,
        show_default=False,
    ),
]
LearnTime = Annotated[
    float | None,
    typer.Option(
        "--learn-time",
        help="Fraction of time that the trainer may use while requests run; 0: only when idle."
        " Default: 0 on a CPU, 0.1 on a GPU.",
        show_default=False,
    ),
]
LearnMemory = Annotated[
    float,
    typer.Option(
        "--learn-memory",
        help="GiB of a GPU's memory that the KV cache leaves to the trainer, with --learn.",
    ),
]
LearnReplay = Annotated[
    str | None,
    typer.Option(
        "--learn-replay",
        help="Folder of `peagle regenerate`: its answers are trained on too, against forgetting.",
        show_default=False,
    ),
]

# Limits and logs.
MaxBodyMb = Annotated[
    float, typer.Option("--max-body-mb", help="Maximum size of a request's body, in MB.")
]
Timeout = Annotated[
    float, typer.Option("--timeout", help="Maximum seconds for an answer; 0: no limit.")
]
StepTimeout = Annotated[
    float,
    typer.Option(
        "--step-timeout",
        help="Seconds of one engine step after which its process is replaced; 0: no limit.",
    ),
]
DrainSeconds = Annotated[
    float,
    typer.Option("--drain-seconds", help="Seconds that running requests get after SIGTERM."),
]
LogPrompts = Annotated[bool, typer.Option("--log-prompts", help="Write prompts into the log.")]
