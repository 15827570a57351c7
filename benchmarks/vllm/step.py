"""vLLM's side of `peagle bench-step`: random weights of a shape, drafts accepted as the same profile says.

    PYTHONPATH=.:VLLM python tests/vllm/measure_step.py SHAPE METHOD K 1,8,64 [GO]

Prints a JSON line a concurrency. With GO, the name of a file, it gets ready and waits until that file is there:
several can get ready at once and be measured one after another.
"""

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

PROMPT, OUTPUT, REPEATS = 128, 256, 3
PROFILE = (0.78, 0.59, 0.43, 0.29, 0.18, 0.10, 0.05)


def folders(shape: str, method: str, root: Path) -> tuple[Path, Path]:
    """Configs of a target and a drafter; the weights are vLLM's own random ones."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from peagle.bench.random_models import SHAPES
    from peagle.drafter.config import config_for
    from peagle.drafter.formats.vllm import config_to_json
    from peagle.target import Target

    config = LlamaConfig(**SHAPES[shape], architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(root / "target")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layers = 4 if method == "p-eagle" else 1
    mask = config.vocab_size - 1
    made = config_for(
        Target(model, name=shape), method, layers, None, mask_token_id=mask, trained=False
    )
    (root / "drafter").mkdir()
    (root / "drafter" / "config.json").write_text(json.dumps(config_to_json(made, torch.bfloat16)))
    return root / "target", root / "drafter"


def main(shape: str, method: str, k: str, concurrency: str, go: str | None = None) -> None:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    counts = [int(word) for word in concurrency.split(",")]
    with tempfile.TemporaryDirectory() as root:
        target, drafter = folders(shape, method if method != "none" else "eagle3", Path(root))
        more = {}
        if method != "none":
            more["speculative_config"] = {
                "method": "eagle3",
                "model": str(drafter),
                "num_speculative_tokens": int(k),
                "parallel_drafting": method == "p-eagle",
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": list(PROFILE[: int(k)]),
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
            **more,
        )
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    print(json.dumps({"ready": f"{shape} {method}"}), flush=True)
    while go and not Path(go).exists():
        time.sleep(0.2)
    rng = random.Random(0)
    for count in counts:
        prompts = [
            TokensPrompt(prompt_token_ids=[rng.randrange(1000) for _ in range(PROMPT)])
            for _ in range(count)
        ]
        best = 0.0
        for i in range(REPEATS + 1):  # the first one warms up
            start = time.perf_counter()
            answers = llm.generate(prompts, sampling, use_tqdm=False)
            spent = time.perf_counter() - start
            tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
            best = max(best, tokens / spent) if i else 0.0
        told = {
            "shape": shape,
            "method": method,
            "k": k,
            "concurrency": count,
            "tokens_per_second": round(best),
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
