"""Measure the default pair on this CPU: all methods, transformers' `generate`, and vLLM.

    python -m benchmarks.cpu.methods DATA [VLLM_PYTHON]     # DATA: the folder with humaneval.jsonl

All use the same prompts of humaneval, dtype and number of threads, one after another. Methods of
peagle run twice, and the median counts. vLLM runs only if VLLM_PYTHON, its interpreter, is given.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from peagle.bench.step_cost import measure_prompts
from peagle.core import Method
from peagle.data.bench import read_sets
from peagle.export.export import export
from peagle.loaded import LoadedPair, load

MAX_TOKENS = 96
REPEATS = 2
NUM_PROMPTS = {1: 4, 4: 8, 8: 16}  # by concurrency
VLLM_K = 5
VLLM_SPEED = Path(__file__).parents[1] / "vllm" / "speed.py"


def generate_speed(pair: LoadedPair, prompts: list[list[int]]) -> float:
    """Tokens per second of transformers' own greedy loop."""
    model: Any = pair.target.model
    tokens = 0
    started = time.perf_counter()
    for ids in prompts:
        with torch.inference_mode():
            output = model.generate(torch.tensor([ids]), max_new_tokens=MAX_TOKENS, do_sample=False)
        tokens += output.shape[1] - len(ids)
    return tokens / (time.perf_counter() - started)


def vllm_speed(
    python: str, pair: LoadedPair, prompts: list[list[int]], concurrency: int, drafter: Path | None
) -> float:
    job = {
        "model": str(pair.target.folder),
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "prompts": prompts,
        "threads": torch.get_num_threads(),
        "concurrency": concurrency,
        "max_tokens": MAX_TOKENS,
        "drafter": drafter and str(drafter),
        "k": VLLM_K,
        "parallel": True,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(job, file)
        file.flush()
        done = subprocess.run(
            [python, str(VLLM_SPEED), file.name],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return float("nan")
    return float(json.loads(done.stdout.splitlines()[-1])["tokens_per_second"])


def measure_speeds(
    pair: LoadedPair, prompts: list[list[int]], concurrency: int, vllm_python: str | None
) -> dict[str, list[float]]:
    """Tokens per second by name, one value per repeat."""
    speeds: dict[str, list[float]] = {}
    methods: tuple[Method, ...] = ("none", "eagle3", "p-eagle")
    for _ in range(REPEATS):
        for method in methods:
            cell = measure_prompts(pair, method, "auto", concurrency, prompts, MAX_TOKENS)
            speeds.setdefault(method, []).append(cell.tokens_per_second)
        if concurrency == 1:
            speeds.setdefault("transformers", []).append(generate_speed(pair, prompts))
    if vllm_python and concurrency != 4:
        with tempfile.TemporaryDirectory() as folder:
            drafter = Path(folder) / "d"
            export(pair.drafter("p-eagle"), drafter, "vllm", VLLM_K)
            plain = vllm_speed(vllm_python, pair, prompts, concurrency, None)
            drafted = vllm_speed(vllm_python, pair, prompts, concurrency, drafter)
        speeds |= {"vllm none": [plain], f"vllm p-eagle K={VLLM_K}": [drafted]}
    return speeds


def main(data: str, vllm_python: str | None = None) -> None:
    pair = load()
    tasks = read_sets(["humaneval"], Path(data), max(NUM_PROMPTS.values()))["humaneval"]
    prompts = [pair.encode([{"role": "user", "content": task.turns[0]}]) for task in tasks]
    for concurrency, count in NUM_PROMPTS.items():
        speeds = measure_speeds(pair, prompts[:count], concurrency, vllm_python)
        base = median(speeds["none"])
        for name, values in speeds.items():
            speed = median(values)
            print(
                f"c={concurrency} {name:18} {speed:7.1f} tokens/s  {speed / base:.2f} of none",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
