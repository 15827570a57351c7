"""The environment variables whose values may be printed; those of all others are secret.

A value is printed if the user said that it is public, or if its name is in the lists here. The
opposite, a list of the names of secrets, always misses some: OPENAI_APIKEY, DB_PASSWD.
"""

from collections.abc import Collection, Iterable

from peagle.deploy.sagemaker.plan.environment import TIKTOKEN_VARIABLE, VLLM_PREFIX

# Options of `vllm serve` about models, memory and speed. Omitted: api-key, hf-token, ssl-* and
# options that can contain a secret, like hf-overrides or a URL with a password.
VLLM_OPTIONS = """
    async-scheduling attention-backend block-size calculate-kv-scales chat-template-content-format
    code-revision compilation-config config-format convert cpu-offload-gb cuda-graph-sizes
    data-parallel-size default-chat-template-kwargs disable-cascade-attn disable-custom-all-reduce
    disable-log-requests disable-log-stats disable-sliding-window distributed-executor-backend
    dtype enable-auto-tool-choice enable-chunked-prefill enable-expert-parallel
    enable-force-include-usage enable-log-requests enable-lora enable-prefix-caching
    enable-prompt-tokens-details enable-server-load-tracking enforce-eager generation-config
    gpu-memory-utilization kv-cache-dtype kv-cache-memory-bytes limit-mm-per-prompt load-format
    logprobs-mode long-prefill-token-threshold max-cpu-loras max-log-len max-logprobs max-lora-rank
    max-loras max-model-len max-num-batched-tokens max-num-partial-prefills max-num-seqs
    max-parallel-loading-workers mm-processor-cache-gb model model-impl num-gpu-blocks-override
    numa-bind optimization-level override-generation-config pipeline-parallel-size
    prefix-caching-hash-algo quantization reasoning-parser response-role return-tokens-as-token-ids
    revision runner safetensors-load-strategy scheduling-policy seed served-model-name
    skip-tokenizer-init speculative-config structured-outputs-config swap-space task
    tensor-parallel-size tokenizer tokenizer-mode tokenizer-revision tool-call-parser
    trust-remote-code uvicorn-log-level
"""
OTHER_NAMES = """
    CUDA_VISIBLE_DEVICES HF_HUB_DISABLE_TELEMETRY HF_HUB_OFFLINE LANG LC_ALL LD_LIBRARY_PATH
    NCCL_DEBUG NCCL_P2P_DISABLE OMP_NUM_THREADS PYTHONUNBUFFERED PYTORCH_ALLOC_CONF
    PYTORCH_CUDA_ALLOC_CONF TOKENIZERS_PARALLELISM TRANSFORMERS_OFFLINE TZ VLLM_ATTENTION_BACKEND
    VLLM_LOGGING_LEVEL VLLM_NO_USAGE_STATS VLLM_USE_DEEP_GEMM VLLM_USE_FLASHINFER_SAMPLER
    VLLM_USE_V1 VLLM_USE_V2_MODEL_RUNNER VLLM_WORKER_MULTIPROC_METHOD
"""


def vllm_variable(option: str) -> str:
    """max-model-len -> SM_VLLM_MAX_MODEL_LEN; `no-x` turns x off."""
    return VLLM_PREFIX + option.upper().replace("-", "_")


PUBLIC_NAMES = frozenset(
    {
        TIKTOKEN_VARIABLE,
        *OTHER_NAMES.split(),
        *(vllm_variable(option) for option in VLLM_OPTIONS.split()),
        *(vllm_variable(f"no-{option}") for option in VLLM_OPTIONS.split()),
    }
)


def secret_names(names: Iterable[str], public: Collection[str]) -> frozenset[str]:
    """Those of the names that are neither known to be public nor in `public`."""
    return frozenset(name for name in names if name not in PUBLIC_NAMES and name not in public)
