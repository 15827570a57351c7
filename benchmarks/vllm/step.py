"""Measure vLLM as `peagle bench-step` measures peagle: random weights, the same acceptance rates.

    PYTHONPATH=.:VLLM python benchmarks/vllm/step.py SHAPE METHOD K 1,8,64 [GO] [--profile .8,.6,.4]

SHAPE is a name that bench-step knows, a config.json of transformers or its folder. One JSON line
per concurrency is printed; `experts_touched` is the mean per layer and pass, counted in a run of
its own. With GO, the name of a file, the models are loaded and then the process waits until that
file exists: several processes can load at once and be measured one after another
(step_group.py).
"""

import argparse
import contextlib
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.vllm.routing import ExpertCounter, patch_dummy_weights

if TYPE_CHECKING:
    from peagle.core import Method

# The patches of routing.py need the engine in this process; a variable that is set stays.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ |= {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

PROFILE = "0.78,0.59,0.43,0.29,0.18,0.10,0.05"
COUNTED_TOKENS = 24  # of an answer, in the run that counts experts


def write_configs(shape: str, method: "Method", root: Path) -> tuple[Path, Path, int]:
    """Write configs of a target and a drafter; vLLM itself makes their random weights.

    Returns both folders and the size of the vocabulary.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from peagle.bench.shapes import shape_config, shape_name
    from peagle.drafter.config import config_for
    from peagle.drafter.formats.vllm import config_to_json
    from peagle.target import Target

    config = shape_config(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )
    config.architectures = [type(model).__name__]
    config.dtype = "bfloat16"
    config.save_pretrained(root / "target")
    layers = 4 if method == "p-eagle" else 1
    mask = config.vocab_size - 1
    drafter = config_for(
        Target(model, name=shape_name(shape)),
        method,
        layers,
        None,
        mask_token_id=mask,
        trained=False,
    )
    (root / "drafter").mkdir()
    record = config_to_json(drafter, torch.bfloat16)
    (root / "drafter" / "config.json").write_text(json.dumps(record))
    return root / "target", root / "drafter", config.vocab_size


def shared_configs(shape: str, method: "Method") -> tuple[Path, Path, int]:
    """`write_configs` in a folder with a fixed name: the key of vLLM's compile cache contains it.

    So K is no part of the key, and all K of a method share what the first one compiled.
    """
    name = "".join(c if c.isalnum() else "-" for c in shape)
    folder = Path(tempfile.gettempdir()) / f"peagle-vllm-{name}-{method}"
    root = Path(tempfile.mkdtemp())
    _, _, vocab_size = write_configs(shape, method, root)
    with contextlib.suppress(OSError):  # Another process was first, with the same files.
        root.rename(folder)
    return folder / "target", folder / "drafter", vocab_size


def capture_sizes(max_requests: int, k: int) -> list[int]:
    """Rows of the CUDA graphs: for up to 8 requests one for each number of them, then coarser.

    vLLM's own list is about twice as long, and takes twice as long to capture.
    """
    requests = [*range(1, 9), 10, 12, 14, *range(16, max_requests, 4), max_requests]
    return [(k + 1) * count for count in requests if count <= max_requests]


def load_llm(options: argparse.Namespace, counts: list[int]) -> tuple[Any, int]:
    """The engine, and the size of its vocabulary."""
    from vllm import LLM

    parallel = options.method == "p-eagle"
    extra: dict[str, Any] = {}
    if options.kv_gib:  # vLLM's own memory profile (GPU_SHARE) fails beside another process.
        extra["kv_cache_memory_bytes"] = int(options.kv_gib * (1 << 30))
    method: Method = "p-eagle" if parallel else "eagle3"
    target, drafter, vocab_size = shared_configs(options.shape, method)
    if options.method != "none":
        rates = [float(word) for word in options.profile.split(",")]
        extra["speculative_config"] = {
            "method": "eagle3",
            "model": str(drafter),
            "num_speculative_tokens": options.k,
            "parallel_drafting": parallel,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [*rates, *[0.0] * options.k][: options.k],
        }
    llm = LLM(
        model=str(target),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=max(counts),
        gpu_memory_utilization=float(os.environ.get("GPU_SHARE", "0.1")),
        enable_prefix_caching=False,
        enforce_eager=options.eager,
        compilation_config={"cudagraph_capture_sizes": capture_sizes(max(counts), options.k)},
        seed=0,
        **extra,
    )
    return llm, vocab_size


def measure(
    llm: Any, prompts: list[list[int]], options: argparse.Namespace, counter: ExpertCounter
) -> dict[str, Any]:
    """The best speed of several runs, and the experts touched in one more."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    inputs = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]

    def sampling(tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)

    best = 0.0
    for i in range(options.repeats + 1):  # The first is the warm-up.
        start = time.perf_counter()
        answers = llm.generate(inputs, sampling(options.output), use_tqdm=False)
        spent = time.perf_counter() - start
        tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
        best = max(best, tokens / spent) if i else 0.0
    drafted = 0 if options.method == "none" else options.k
    with counter.counting(len(prompts) * (drafted + 1)):
        llm.generate(inputs, sampling(COUNTED_TOKENS), use_tqdm=False)
    touched = counter.mean
    return {
        "shape": options.shape,
        "method": options.method,
        "k": options.k,
        "concurrency": len(prompts),
        "tokens_per_second": round(best),
        "experts_touched": None if touched is None else round(touched, 1),
    }


def main(options: argparse.Namespace) -> None:
    counts = [int(word) for word in options.concurrency.split(",")]
    counter = ExpertCounter()
    patch_dummy_weights()
    counter.install()
    started = time.perf_counter()
    llm, vocab_size = load_llm(options, counts)
    seconds = round(time.perf_counter() - started)
    ready = f"{options.shape} {options.method} {options.k}"
    print(json.dumps({"ready": ready, "seconds": seconds}), flush=True)
    while options.go and not Path(options.go).exists():
        time.sleep(0.2)
    rng = random.Random(0)
    for count in counts:
        prompts = [[rng.randrange(vocab_size) for _ in range(options.prompt)] for _ in range(count)]
        print(json.dumps(measure(llm, prompts, options, counter)), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure vLLM as bench-step measures peagle.")
    parser.add_argument("shape")
    parser.add_argument("method", choices=("none", "eagle3", "p-eagle"))
    parser.add_argument("k", type=int)
    parser.add_argument("concurrency")
    parser.add_argument("go", nargs="?")
    parser.add_argument("--profile", default=PROFILE, help="acceptance rate of each position")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-gib", type=float, default=4.0, help="KV cache; 0: GPU_SHARE")
    parser.add_argument("--eager", action="store_true", help="no torch.compile, no CUDA graphs")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_arguments())
