"""The pair with a quantized target in vLLM: acceptance length, answers and speed against bf16.

    python benchmarks/vllm/quantized.py WORK OUT.json [--formats bf16,fp8,int8,int4]
        [--methods none,p-eagle,eagle3] [--seconds 540] [--tokens 128] [-k 7] [--eager]
        [--at-once 1]

WORK is the folder that `python -m benchmarks.quantized.formats make` wrote. Each format and method
runs in its own process, because an engine of vLLM cannot be shut down inside one. OUT is written
after each of them; those that failed or did not fit into the time are marked in it. `--at-once` is
the number of engines that load at the same time; they answer one after another. Nothing of peagle
is imported.
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # Counters are read in this process.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # P-EAGLE needs the V1 model runner.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

Json = dict[str, Any]
FORMATS = ("bf16", "fp8", "int8", "int4")
METHODS = ("none", "p-eagle", "eagle3")
COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "per_position",
}


def read_counters(llm: Any) -> Json:
    return {
        COUNTERS[metric.name]: list(metric.values) if hasattr(metric, "values") else metric.value
        for metric in llm.get_metrics()
        if metric.name in COUNTERS
    }


def measure_sets(work: Path, name: str, method: str, options: argparse.Namespace) -> Json:
    """Measure one format and method with every set; this runs in its own process."""
    os.environ |= ENVIRONMENT
    import torch
    from vllm import LLM, SamplingParams

    llm_options: Json = {}
    if torch.cuda.is_available():
        llm_options["kv_cache_memory_bytes"] = 2 << 30  # Free memory is not measured then.
    if method != "none":
        llm_options["speculative_config"] = {
            "method": "eagle3",
            "model": str(work / "drafters" / method),
            "num_speculative_tokens": options.k,
            "parallel_drafting": method == "p-eagle",
        }
    llm = LLM(
        model=str(work / name),
        dtype="bfloat16",
        max_num_seqs=1,
        max_model_len=2048,
        enforce_eager=options.eager,
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.15,
        enable_prefix_caching=False,
        seed=0,
        disable_log_stats=False,
        **llm_options,
    )
    ends = json.loads((work / name / "config.json").read_text()).get("eos_token_id")
    stops = ends if isinstance(ends, list) else [] if ends is None else [ends]
    sampling = SamplingParams(
        temperature=0.0, max_tokens=options.tokens, stop_token_ids=stops, detokenize=False
    )
    prompts = json.loads((work / "prompts.json").read_text())
    with exclusive(work):
        return {
            label: measure_answers(llm, sampling, prompts[label], method != "none")
            for label in prompts
        }


@contextmanager
def exclusive(work: Path) -> Iterator[None]:
    """Wait until no other process of this benchmark answers."""
    with (work / ".turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measure_answers(llm: Any, sampling: Any, prompts: list[list[int]], drafted: bool) -> Json:
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    llm.generate(requests[:1], sampling, use_tqdm=False)
    before = read_counters(llm)
    started = time.perf_counter()
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    spent = time.perf_counter() - started
    result = {"answers": answers, "tokens_per_second": round(sum(map(len, answers)) / spent, 1)}
    return result | (acceptance(before, read_counters(llm)) if drafted else {})


def acceptance(before: Json, after: Json) -> Json:
    drafts = after["drafts"] - before.get("drafts", 0)
    earlier = before.get("per_position") or [0] * len(after["per_position"])
    shares = [(b - a) / drafts for a, b in zip(earlier, after["per_position"], strict=True)]
    length = 1 + (after["accepted"] - before.get("accepted", 0)) / drafts
    return {
        "acceptance_length": round(length, 4),
        "per_position": [round(share, 4) for share in shares],
    }


def run(work: Path, name: str, method: str, options: argparse.Namespace, end: float) -> Json:
    """Measure in a new process; if it fails, the result is its last error message."""
    left = end - time.monotonic()
    if left < 5:
        return {"failed": "no time left"}
    result = options.out.with_suffix(f".{name}.{method}.part")
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, str(work), str(result), "--one", name, method]
    command += ["--tokens", str(options.tokens), "-k", str(options.k)]
    command += ["--eager"] if options.eager else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer within {left:.0f} s"}
    if done.returncode or not result.is_file():
        return {"failed": last_error(done.stderr + done.stdout)}
    sets: Json = json.loads(result.read_text())
    result.unlink()
    return sets


def last_error(text: str) -> str:
    errors = [
        line.strip() for line in text.splitlines() if "Error" in line and "Traceback" not in line
    ]
    return (errors or text.strip().splitlines() or ["no reason given"])[-1][-600:]


def agreement(plain: list[list[int]], other: list[list[int]]) -> Json:
    """The number of identical answers, and the mean length of the common prefixes."""
    prefixes = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in zip(plain, other, strict=True)
    ]
    same = sum(a == b for a, b in zip(plain, other, strict=True))
    return {"same": same, "of": len(plain), "alike_for": round(sum(prefixes) / len(prefixes), 1)}


def summarize(results: dict[tuple[str, str], Json], options: argparse.Namespace) -> Json:
    """Replace the answers by their agreement with bf16's, and with `none`'s of the same format."""
    cells: list[Json] = []
    for (name, method), sets in results.items():
        if "failed" in sets:
            cells.append({"format": name, "method": method, "failed": sets["failed"]})
            continue
        for label, result in sets.items():
            cell: Json = {"format": name, "method": method, "set": label}
            cell |= {key: value for key, value in result.items() if key != "answers"}
            for key, other in {"as_bf16": ("bf16", method), "as_none": (name, "none")}.items():
                if label in results.get(other, {}) and other != (name, method):
                    cell[key] = agreement(results[other][label]["answers"], result["answers"])
            plain = results.get(("bf16", method), {}).get(label, {}).get("tokens_per_second")
            if plain:
                cell["of_bf16"] = round(result["tokens_per_second"] / plain, 3)
            cells.append(cell)
    settings = ("tokens", "k", "eager", "at_once")
    return {name: getattr(options, name) for name in settings} | {"cells": cells}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("-k", type=int, default=7)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument(
        "--one", nargs=2, metavar=("FORMAT", "METHOD"), help="measure in this process"
    )
    options = parser.parse_args()
    if options.one:
        name, method = options.one
        options.out.write_text(json.dumps(measure_sets(options.work, name, method, options)))
        return
    end = time.monotonic() + options.seconds
    results: dict[tuple[str, str], Json] = {}
    cells = [
        (name, method)
        for method in options.methods.split(",")
        for name in options.formats.split(",")
    ]
    with ThreadPoolExecutor(options.at_once) as pool:
        running = {pool.submit(run, options.work, *cell, options, end): cell for cell in cells}
        for done in as_completed(running):
            results[running[done]] = done.result()
            options.out.write_text(json.dumps(summarize(results, options), indent=1))
            print(*running[done], results[running[done]].get("failed", "done"), flush=True)


if __name__ == "__main__":
    main()
