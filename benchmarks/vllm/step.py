"""Measure vLLM as `peagle bench-step` measures peagle: random weights, the same acceptance rates.

    PYTHONPATH=.:VLLM python benchmarks/vllm/step.py SHAPE METHOD K 1,8,64 [GO]

It prints one JSON line per concurrency. With GO, the name of a file, it loads the models and then
waits until that file exists: several processes can load at once and be measured one after another.
"""

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle.core import Method

os.environ |= {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 256
REPEATS = 3
ACCEPTANCE_RATES = (0.78, 0.59, 0.43, 0.29, 0.18, 0.10, 0.05)


def write_configs(shape: str, method: "Method", root: Path) -> tuple[Path, Path]:
    """Write configs of a target and a drafter; vLLM itself makes their random weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from peagle.bench.random_models import SHAPES
    from peagle.drafter.config import config_for
    from peagle.drafter.formats.vllm import config_to_json
    from peagle.target import Target

    config = LlamaConfig(**SHAPES[shape], architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(root / "target")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )
    layers = 4 if method == "p-eagle" else 1
    mask = config.vocab_size - 1
    drafter = config_for(
        Target(model, name=shape), method, layers, None, mask_token_id=mask, trained=False
    )
    (root / "drafter").mkdir()
    record = config_to_json(drafter, torch.bfloat16)
    (root / "drafter" / "config.json").write_text(json.dumps(record))
    return root / "target", root / "drafter"


def main(shape: str, method: str, k: str, concurrency: str, go: str | None = None) -> None:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    parallel = method == "p-eagle"
    counts = [int(word) for word in concurrency.split(",")]
    with tempfile.TemporaryDirectory() as root:
        target, drafter = write_configs(shape, "p-eagle" if parallel else "eagle3", Path(root))
        options: dict[str, Any] = {}
        if method != "none":
            options["speculative_config"] = {
                "method": "eagle3",
                "model": str(drafter),
                "num_speculative_tokens": int(k),
                "parallel_drafting": parallel,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": list(ACCEPTANCE_RATES[: int(k)]),
            }
        llm = LLM(
            model=str(target),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=max(counts),
            gpu_memory_utilization=float(os.environ.get("GPU_SHARE", "0.3")),
            enable_prefix_caching=False,
            seed=0,
            **options,
        )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False
    )
    print(json.dumps({"ready": f"{shape} {method}"}), flush=True)
    while go and not Path(go).exists():
        time.sleep(0.2)
    rng = random.Random(0)
    for count in counts:
        prompts = [
            TokensPrompt(prompt_token_ids=[rng.randrange(1000) for _ in range(PROMPT_TOKENS)])
            for _ in range(count)
        ]
        best = 0.0
        for i in range(REPEATS + 1):  # The first is the warm-up.
            start = time.perf_counter()
            answers = llm.generate(prompts, sampling, use_tqdm=False)
            spent = time.perf_counter() - start
            tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
            best = max(best, tokens / spent) if i else 0.0
        result = {
            "shape": shape,
            "method": method,
            "k": k,
            "concurrency": count,
            "tokens_per_second": round(best),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
