"""vLLM in a process of its own: reads a job (JSON), generates greedily, writes what its drafter did (JSON).

    python worker.py job.json result.json

One engine per process, because vLLM's distributed state and its CPU thread binding are per process. Nothing of peagle is
imported here: what vLLM does must not depend on it.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: its runner can be watched
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


def watch_drafter(prompts: list[list[int]]) -> list[list[Json]]:
    """From now on every request's passes: the tokens the target gave, and the drafts that follow them.

    The rows of a batch move as requests come and go, so each is looked up by its prompt; hence prompts must differ.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert len({tuple(prompt) for prompt in prompts}) == len(prompts), "two equal prompts cannot be told apart"
    passes: list[list[Json]] = [[] for _ in prompts]
    original = GPUModelRunner.propose_draft_token_ids

    def watched(runner: Any, scheduler_output: Any, sampled: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = original(runner, scheduler_output, sampled, *args, **kwargs)
        unfinished = runner.discard_request_mask.gpu.tolist()  # rows whose prompt is not read to its end yet
        for row, request in enumerate(runner.input_batch.req_ids):
            if unfinished[row]:
                continue
            tokens = [token for token in sampled[row].tolist() if token >= 0]  # -1: rejected
            seen = passes[prompts.index(list(runner.requests[request].prompt_token_ids))]
            seen.append({"tokens": tokens, "drafts": drafts[row].tolist()})
        return drafts

    GPUModelRunner.propose_draft_token_ids = watched  # type: ignore[method-assign]
    return passes


def counters(llm: Any) -> Json:
    found = {COUNTERS[metric.name]: metric for metric in llm.get_metrics() if metric.name in COUNTERS}
    return {name: getattr(metric, "values", None) or metric.value for name, metric in found.items()}


def main(job_file: str, result_file: str) -> None:
    job: Json = json.loads(Path(job_file).read_text())
    prompts: list[list[int]] = job["prompts"]
    passes = watch_drafter(prompts)
    from vllm import LLM, SamplingParams

    llm = LLM(
        **job["engine"], dtype="float32", enforce_eager=True, skip_tokenizer_init=True, seed=0, disable_log_stats=False
    )
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True, detokenize=False)
        for limit in job["max_tokens"]
    ]
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    outputs = [list(answer.outputs[0].token_ids) for answer in answers]
    Path(result_file).write_text(json.dumps({"outputs": outputs, "passes": passes, "counters": counters(llm)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
