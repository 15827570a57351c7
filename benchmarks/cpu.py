"""The shipped pair on this CPU, humaneval prompts: our methods, transformers' generate, and vLLM's where it is there.

    python -m tests.measure_cpu DATA [VLLM_PYTHON]     DATA: the folder with humaneval.jsonl

Everything with the same prompts, dtype and number of threads, one after another; ours twice around, the median.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from peagle.bench.step_cost import measure_prompts
from peagle.data.bench import read_sets
from peagle.export.export import export
from peagle.loaded import LoadedPair, load

TOKENS, ROUNDS = 96, 2
PROMPTS = {1: 4, 4: 8, 8: 16}


def generate_speed(pair: LoadedPair, prompts: list[list[int]]) -> float:
    """transformers' own greedy loop."""
    model, tokens, start = pair.target.model, 0, time.perf_counter()
    for ids in prompts:
        with torch.inference_mode():
            out = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)
        tokens += out.shape[1] - len(ids)
    return tokens / (time.perf_counter() - start)


def vllm_speed(
    python: str, pair: LoadedPair, prompts: list[list[int]], concurrency: int, drafter: Path | None
) -> float:
    job = {
        "model": str(pair.target.folder),
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "prompts": prompts,
        "threads": torch.get_num_threads(),
        "concurrency": concurrency,
        "max_tokens": TOKENS,
        "drafter": drafter and str(drafter),
        "k": 5,
        "parallel": True,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(job, file)
        file.flush()
        done = subprocess.run(
            [python, "tests/vllm/measure_speed.py", file.name],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return float("nan")
    return json.loads(done.stdout.splitlines()[-1])["tokens_per_second"]


def main(data: str, python: str | None = None) -> None:
    pair = load()
    tasks = read_sets(["humaneval"], Path(data), max(PROMPTS.values()))["humaneval"]
    prompts = [pair.encode([{"role": "user", "content": task.turns[0]}]) for task in tasks]
    for concurrency, count in PROMPTS.items():
        found: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for method in ("none", "eagle3", "p-eagle"):
                cell = measure_prompts(pair, method, "auto", concurrency, prompts[:count], TOKENS)
                found.setdefault(method, []).append(cell.tokens_per_second)
            if concurrency == 1:
                found.setdefault("transformers", []).append(generate_speed(pair, prompts[:count]))
        if python and concurrency != 4:
            with tempfile.TemporaryDirectory() as folder:
                export(pair.drafter("p-eagle"), Path(folder) / "d", "vllm", 5)
                for name, drafter in (
                    ("vllm none", None),
                    ("vllm p-eagle K=5", Path(folder) / "d"),
                ):
                    found[name] = [vllm_speed(python, pair, prompts[:count], concurrency, drafter)]
        base = median(found["none"])
        for name, speeds in found.items():
            print(
                f"c={concurrency} {name:18} {median(speeds):7.1f} tokens/s  {median(speeds) / base:.2f} of none",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
