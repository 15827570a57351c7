"""Run vLLM in its own process: read a job (JSON), generate greedily, write the drafter's passes.

    python worker.py job.json result.json

There is one engine per process, because vLLM's distributed state and its CPU thread binding belong
to the process. Nothing of peagle is imported here, so that vLLM runs independently of it.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # The engine runs in this process.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

Json = dict[str, Any]
COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
    "vllm:prefix_cache_hits": "prefix_cache_hits",
}


def watch_drafter(prompts: list[list[int]]) -> list[Json]:
    """Record the passes of each request from now on, and where its prompt was cut into chunks.

    A pass is the target's tokens and the drafts proposed after them. Rows of a batch move as
    requests come and go, so a request is looked up by its prompt: prompts must differ.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert len({tuple(prompt) for prompt in prompts}) == len(prompts), "two prompts are equal"
    seen: list[Json] = [{"passes": [], "chunk_ends": []} for _ in prompts]
    original = GPUModelRunner.propose_draft_token_ids

    def watched(runner: Any, scheduled: Any, sampled: Any, *args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        drafts = original(runner, scheduled, sampled, *args, **kwargs)
        # Rows whose prompt is not complete have no token yet, and their drafts are not used.
        unread = runner.discard_request_mask.gpu.tolist()
        for row, request in enumerate(batch.req_ids):
            record = seen[prompts.index(list(runner.requests[request].prompt_token_ids))]
            if unread[row]:
                end = batch.num_computed_tokens_cpu[row] + scheduled.num_scheduled_tokens[request]
                record["chunk_ends"].append(int(end))
                continue
            tokens = [token for token in sampled[row].tolist() if token >= 0]  # -1: rejected
            record["passes"].append({"tokens": tokens, "drafts": drafts[row].tolist()})
        return drafts

    GPUModelRunner.propose_draft_token_ids = watched
    return seen


def read_counters(llm: Any) -> Json:
    return {
        COUNTERS[metric.name]: metric.values if hasattr(metric, "values") else metric.value
        for metric in llm.get_metrics()
        if metric.name in COUNTERS
    }


def main(job_file: str, result_file: str) -> None:
    job: Json = json.loads(Path(job_file).read_text())
    prompts: list[list[int]] = job["prompts"]
    seen = watch_drafter(prompts)
    from vllm import LLM, SamplingParams

    llm = LLM(
        **job["engine"],
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        seed=0,
        disable_log_stats=False,
    )
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True, detokenize=False)
        for limit in job["max_tokens"]
    ]
    answers = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
    )
    for record, answer in zip(seen, answers, strict=True):
        record["output"] = list(answer.outputs[0].token_ids)
    Path(result_file).write_text(json.dumps({"requests": seen, "counters": read_counters(llm)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
