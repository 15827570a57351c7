"""Measure vLLM on this CPU, for `make bench-vllm`: one configuration per process.

    python benchmarks/vllm/speed.py JOB.json     # prints {"tokens_per_second": ..., "tokens": ...}

JOB has model, dtype, threads, concurrency, max_tokens and prompts (token ids); with P-EAGLE or
EAGLE-3 also drafter, k and parallel. It runs in vLLM's environment and imports nothing of peagle.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(job_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "0" if job["threads"] == 1 else f"0-{job['threads'] - 1}",
    }
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {}
    if job.get("drafter"):
        options["speculative_config"] = {
            "method": "eagle3",
            "model": job["drafter"],
            "num_speculative_tokens": job["k"],
            "parallel_drafting": job["parallel"],
        }
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_num_seqs=job["concurrency"],
        max_model_len=2048,
        enforce_eager=job.get("eager", False),
        enable_prefix_caching=False,
        seed=0,
        **options,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"])
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    llm.generate(prompts[: job["concurrency"]], sampling, use_tqdm=False)
    start = time.perf_counter()
    answers = llm.generate(prompts, sampling, use_tqdm=False)
    spent = time.perf_counter() - start
    tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    print(json.dumps({"tokens_per_second": tokens / spent, "tokens": tokens}))


if __name__ == "__main__":
    main(sys.argv[1])
