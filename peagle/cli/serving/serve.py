import typer

from peagle.cli.application import app
from peagle.cli.options import Device, DrafterWindow, Dtype, Exact, Int8, Method, Ngram, Target
from peagle.cli.serving import options


@app.command()
def serve(
    ctx: typer.Context,
    pair: options.Pair = None,
    model: options.Model = None,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    engine: options.Engine = "native",
    replicas: options.Replicas = None,
    http_workers: options.HttpWorkers = None,
    method: Method = None,
    k: options.K = "auto",
    tree: options.TreeNodes = None,
    ngram: Ngram = None,
    drafter_window: DrafterWindow = None,
    methods: options.Methods = None,
    speculative_config: options.SpeculativeConfigJson = None,
    api_keys: options.ApiKeys = None,
    allow_origins: options.AllowOrigins = None,
    served_model_names: options.ServedModelNames = None,
    max_batch: options.MaxBatch = 64,
    max_queue: options.MaxQueue = 1024,
    kv_tokens: options.KVTokens = None,
    context: options.Context = None,
    chunk: options.Chunk = None,
    target: Target = None,
    drafter: options.Drafters = None,
    int8: Int8 = False,
    exact: Exact = None,
    prefix_caching: options.PrefixCaching = True,
    enforce_eager: options.EnforceEager = False,
    learn: options.Learn = None,
    learn_share: options.LearnShare = 1.0,
    learn_size: options.LearnSize = 1024.0,
    learn_days: options.LearnDays = 30.0,
    learn_opt_out: options.LearnOptOut = None,
    learn_time: options.LearnTime = None,
    learn_memory: options.LearnMemory = 8.0,
    learn_replay: options.LearnReplay = None,
    tool_parser: options.ToolParser = None,
    reasoning_parser: options.ReasoningParser = None,
    vllm_python: options.VllmPython = None,
    tensor_parallel: options.TensorParallel = 1,
    pipeline_parallel: options.PipelineParallel = 1,
    data_parallel: options.DataParallel = 1,
    trust_remote_code: options.TrustRemoteCode = False,
    vllm_arguments: options.VllmArguments = None,
    max_body_mb: options.MaxBodyMb = 25,
    timeout: options.Timeout = 600,
    step_timeout: options.StepTimeout = 300,
    drain_seconds: options.DrainSeconds = 25,
    log_prompts: options.LogPrompts = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Serve a pair: OpenAI's API, SageMaker's container contract, vLLM's metrics.

    With SM_VLLM_* variables it listens as SageMaker expects, on port 8080 (docs/serve.md).

    Example: peagle serve smollm2-135m --port 8000 --api-key SECRET

    With --engine vllm, everything after -- is passed on to vLLM:
    peagle serve PAIR --engine vllm --tensor-parallel-size 4 -- --gpu-memory-utilization 0.92
    """
    from peagle.cli.serving.server_settings import build_settings
    from peagle.server import require_packages

    # The parameters declare the options; `ctx.params` has their values by name.
    settings = build_settings(ctx.params)
    require_packages()
    from peagle.server.run import serve as run_server

    run_server(settings)
