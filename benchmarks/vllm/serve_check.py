"""Compare `peagle bench --endpoint` with `vllm bench serve` on a running server.

    peagle serve --port 8000 --no-enable-prefix-caching
    python -m benchmarks.vllm.serve_check http://127.0.0.1:8000 --set humaneval.jsonl \\
        --tokenizer TARGET --vllm-python .venv-vllm/bin/python --concurrency 1,8

Both send the same prompts with the same length of answers, greedy and streamed, in alternation;
the table has the median of `--repeats` runs. vLLM needs its extra `bench` (pandas), and sends the
prompts in the chat template as completions: for chat completions it takes the chunk of the role,
which `peagle serve` sends before the first token, for the first token.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

# vLLM's CPU build has another distribution name, with which the command `vllm` does not start.
VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
FIGURES = {
    "output_throughput": "tokens/s",
    "median_ttft_ms": "TTFT, median, ms",
    "p99_ttft_ms": "TTFT, p99, ms",
    "median_tpot_ms": "TPOT, median, ms",
    "p99_tpot_ms": "TPOT, p99, ms",
    "spec_decode_acceptance_length": "acceptance length",
}
Figures = dict[str, float]


@dataclass(frozen=True)
class Load:
    url: str
    model: str
    prompts: list[str]
    max_tokens: int
    clients: int
    vllm_python: str
    tokenizer: str

    def measure_with_peagle(self, concurrency: int, folder: Path) -> Figures:
        tasks = [{"id": str(i), "turns": [prompt]} for i, prompt in enumerate(self.prompts)]
        path = write_lines(folder / "tasks.jsonl", tasks)
        options: list[object] = ["--set", path, "--out", folder, "--name", "peagle", "--repeats", 1]
        options += ["--concurrency", concurrency, "--max-tokens", self.max_tokens, "--ignore-eos"]
        clients = min(self.clients, concurrency)
        options += ["--clients", clients, "--model", self.model]
        run([sys.executable, "-m", "peagle", "bench", "--endpoint", self.url, *options])
        [cell] = json.loads((folder / "peagle.json").read_text())["cells"]
        return read_figures(cell, cell["failed"])

    def measure_with_vllm(self, concurrency: int, folder: Path) -> Figures:
        rows = [{"prompt": prompt} for prompt in self.prompts]
        path = write_lines(folder / "prompts.jsonl", rows)
        options: list[object] = ["--backend", "openai", "--endpoint", "/v1/completions"]
        options += ["--base-url", self.url, "--model", self.model, "--tokenizer", self.tokenizer]
        options += ["--dataset-name", "custom", "--dataset-path", path, "--disable-shuffle"]
        options += ["--num-prompts", len(self.prompts), "--max-concurrency", concurrency]
        options += ["--num-warmups", concurrency, "--ignore-eos", "--temperature", 0]
        options += ["--custom-output-len", self.max_tokens]
        # As `peagle bench` does: with `ignore_eos` alone, answers go on behind their end.
        options += ["--extra-body", json.dumps({"min_tokens": self.max_tokens})]
        options += ["--percentile-metrics", "ttft,tpot", "--save-result", "--disable-tqdm"]
        options += ["--result-dir", folder, "--result-filename", "vllm.json"]
        run([self.vllm_python, "-c", VLLM_BENCH_SERVE, *options])
        result = json.loads((folder / "vllm.json").read_text())
        return read_figures(result, len(self.prompts) - result["completed"])


def read_figures(result: dict[str, Any], failed: int) -> Figures:
    if failed:
        raise SystemExit(f"{failed} requests failed: {result.get('first_error') or 'see the log'}")
    return {name: float(result.get(name) or 0) for name in FIGURES}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def run(command: list[object]) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{command[:4]} failed:\n{done.stderr[-2000:]}")


def compare(load: Load, concurrency: int, repeats: int) -> None:
    runs: dict[str, list[Figures]] = {"peagle": [], "vllm": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as name:
            runs["peagle"].append(load.measure_with_peagle(concurrency, Path(name)))
            runs["vllm"].append(load.measure_with_vllm(concurrency, Path(name)))
    for name, label in FIGURES.items():
        ours, theirs = (median(figures[name] for figures in runs[tool]) for tool in runs)
        if ours:  # a server without draft counters has no acceptance length
            change = f"{theirs / ours - 1:+.1%}"
            print(f"| {concurrency} | {label} | {ours:.2f} | {theirs:.2f} | {change} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--set", type=Path, required=True, help="JSON lines with `turns`")
    parser.add_argument("--tokenizer", required=True, help="the folder of the target")
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python")
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    url = options.url.rstrip("/")
    model = httpx.get(f"{url}/v1/models", timeout=20).json()["data"][0]["id"]
    lines = options.set.read_text().splitlines()[: options.requests]
    prompts = [json.loads(line)["turns"][0] for line in lines]
    load = Load(
        url,
        model,
        prompts,
        options.max_tokens,
        options.clients,
        options.vllm_python,
        options.tokenizer,
    )
    print(f"{len(prompts)} requests of {options.max_tokens} tokens, model {model}\n")
    print("| users | | peagle bench | vllm bench serve | difference |\n|--:|---|--:|--:|--:|")
    for concurrency in options.concurrency.split(","):
        compare(load, int(concurrency), options.repeats)


if __name__ == "__main__":
    main()
