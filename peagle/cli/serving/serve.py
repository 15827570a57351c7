from typing import Annotated

import typer

from peagle.catalog import DEFAULT_PAIR
from peagle.cli.application import app
from peagle.cli.options import Device, Dtype, Int8, Method, Target
from peagle.core import parse_method
from peagle.errors import UserError


@app.command()
def serve(
    pair: Annotated[
        str | None,
        typer.Argument(
            help=f"The pair, or a target's folder. Default: {DEFAULT_PAIR}.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The same, as vLLM calls it.", hidden=True)
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="The address. 0.0.0.0: all of this machine's.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="The port.")] = 8000,
    engine: Annotated[
        str, typer.Option("--engine", help="native, or vllm behind the same front.")
    ] = "native",
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas",
            help="Native engines, each in a process and on a GPU of its own.",
            show_default=False,
        ),
    ] = None,
    method: Method = None,
    k: Annotated[
        str, typer.Option("-k", "--k", help="How many tokens to draft; auto follows the load.")
    ] = "auto",
    tree: Annotated[
        int | None,
        typer.Option(
            "--tree",
            help="Nodes of candidate trees, with automatic K at most so many; 0: chains. Default: where they pay.",
            show_default=False,
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            help="What a request may choose. Default: none and the pair's.",
            show_default=False,
        ),
    ] = None,
    speculative: Annotated[
        str | None,
        typer.Option(
            "--speculative-config",
            help="vLLM's JSON: drafter, method, K and tree.",
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            help="A key to ask for.",
            envvar="PEAGLE_API_KEY",
            show_envvar=True,
            show_default=False,
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            help="Without a key: whose web pages may ask, too.",
            show_default=False,
        ),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            help="What requests call it. Default: the pair's.",
            show_default=False,
        ),
    ] = None,
    max_batch: Annotated[
        int, typer.Option("--max-batch", "--max-num-seqs", help="Requests that run at once.")
    ] = 64,
    max_queue: Annotated[
        int, typer.Option("--max-queue", help="Requests that may wait; more get a 429.")
    ] = 1024,
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            "--kv-tokens",
            help="Positions of all requests together. Default: what fits.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            "--max-model-len",
            help="Tokens of a prompt and its answer. Default: the target's.",
            show_default=False,
        ),
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(
            "--max-num-batched-tokens", help="Prompt tokens of one step.", show_default=False
        ),
    ] = None,
    target: Target = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter",
            help="Drafters' folders instead of the pair's, by commas.",
            show_default=False,
        ),
    ] = None,
    int8: Int8 = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Bit-equal with and without drafts; slower.")
    ] = False,
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching", help="Share prompts' beginnings."
        ),
    ] = True,
    eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")] = False,
    vllm_python: Annotated[
        str | None,
        typer.Option(
            "--vllm-python",
            help="The interpreter that has vLLM.",
            envvar="PEAGLE_VLLM_PYTHON",
            show_envvar=True,
            show_default=False,
        ),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel-size", help="vLLM: GPUs that share a layer.")
    ] = 1,
    pipeline_parallel: Annotated[
        int,
        typer.Option(
            "--pipeline-parallel-size", help="vLLM: groups of GPUs that share the layers."
        ),
    ] = 1,
    data_parallel: Annotated[
        int, typer.Option("--data-parallel-size", help="vLLM: copies of the model.")
    ] = 1,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="vLLM only: run code that lies in the checkpoint."
        ),
    ] = False,
    vllm_arguments: Annotated[
        list[str] | None,
        typer.Option("--vllm-argument", help="A word for vLLM's command line.", hidden=True),
    ] = None,
    max_body_mb: Annotated[float, typer.Option("--max-body-mb", help="The longest request.")] = 25,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds an answer may take; 0: no limit.")
    ] = 600,
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", help="After SIGTERM, for answers under way.")
    ] = 25,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write prompts into the log.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Serve a pair: OpenAI's API, SageMaker's contract, vLLM's metrics.

    With SM_VLLM_* variables in the environment it listens as SageMaker wants (port 8080); see docs/serve.md.

    Example: peagle serve smollm2-135m --port 8000 --api-key SECRET

    With --engine vllm, what stands behind -- goes to vLLM as it is:
    peagle serve PAIR --engine vllm --tensor-parallel-size 4 -- --gpu-memory-utilization 0.92
    """
    from peagle.server import require_packages
    from peagle.server.settings import ServerSettings, parse_engine, parse_methods, parse_serving_k
    from peagle.server.speculative import SpeculativeConfig, parse_speculative_config

    kind = parse_engine(engine)
    told = parse_speculative_config(speculative, vllm=kind == "vllm") if speculative else SpeculativeConfig()
    chosen = parse_method(method) if method else told.method
    if told.drafter and drafter:
        raise UserError(
            "a drafter is named twice: by --drafter and by the speculative config's model"
        )
    settings = ServerSettings(
        pair=pair or model or DEFAULT_PAIR,
        target=target,
        drafter=drafter or told.drafter,
        device=device,
        dtype=dtype,
        host=host,
        port=port,
        method=chosen,
        k=told.k if told.k and k == "auto" else parse_serving_k(k),
        tree=told.tree if tree is None else tree,
        methods=parse_methods(methods),
        parallel=told.parallel,
        max_batch=max_batch,
        max_queue=max_queue,
        kv_tokens=kv_tokens,
        context=context,
        chunk=chunk,
        int8=int8,
        exact=exact,
        prefix_caching=prefix_caching,
        graphs=not eager,
        names=tuple(names or ()),
        api_keys=tuple(api_key or ()),
        allow_origins=tuple(allow_origin or ()),
        max_body=int(max_body_mb * (1 << 20)),
        timeout=timeout,
        drain_seconds=drain_seconds,
        log_prompts=log_prompts,
        engine=kind,
        replicas=replicas,
        vllm_python=vllm_python if kind == "vllm" else None,
        vllm_arguments=tuple(vllm_arguments or ()),
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        data_parallel=data_parallel,
        trust_remote_code=trust_remote_code,
        speculative=told.more,
    )
    require_packages()
    from peagle.server.run import serve as run

    run(settings)
