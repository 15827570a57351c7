"""The pair with a quantized target in vLLM: acceptance length, answers and speed beside bf16.

    python tests/vllm/measure_quantized.py WORK OUT.json [--formats bf16,fp8,int8,int4] [--methods none,p-eagle,eagle3]
        [--seconds 540] [--tokens 128] [-k 7] [--eager] [--at-once 1]

WORK: what `python -m tests.measure_quantized make` wrote. Each format and method runs in a process of its own, since an
engine cannot be taken down inside one; OUT is written after each, and what did not fit the time, or was refused, is
told there. `--at-once`: so many get ready side by side; they answer one after another. Nothing of peagle is imported.
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
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # counters are read in this process
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # P-EAGLE needs the first
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

Json = dict[str, Any]
FORMATS, METHODS = ("bf16", "fp8", "int8", "int4"), ("none", "p-eagle", "eagle3")
COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "per_position",
}


def counters(llm: Any) -> Json:
    found = {
        COUNTERS[metric.name]: metric for metric in llm.get_metrics() if metric.name in COUNTERS
    }
    return {name: list(m.values) if hasattr(m, "values") else m.value for name, m in found.items()}


def one(work: Path, name: str, method: str, asked: argparse.Namespace) -> Json:
    """One format and method, every set: in a process of its own."""
    os.environ |= ENVIRONMENT
    import torch
    from vllm import LLM, SamplingParams

    more: Json = (
        {"kv_cache_memory_bytes": 2 << 30} if torch.cuda.is_available() else {}
    )  # no look at free memory
    if method != "none":
        more["speculative_config"] = {
            "method": "eagle3",
            "model": str(work / "drafters" / method),
            "num_speculative_tokens": asked.k,
            "parallel_drafting": method == "p-eagle",
        }
    llm = LLM(
        model=str(work / name),
        dtype="bfloat16",
        max_num_seqs=1,
        max_model_len=2048,
        enforce_eager=asked.eager,
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.15,
        enable_prefix_caching=False,
        seed=0,
        disable_log_stats=False,
        **more,
    )
    ends = json.loads((work / name / "config.json").read_text()).get("eos_token_id")
    stops = ends if isinstance(ends, list) else [] if ends is None else [ends]
    sampling = SamplingParams(
        temperature=0.0, max_tokens=asked.tokens, stop_token_ids=stops, detokenize=False
    )
    prompts = json.loads((work / "prompts.json").read_text())
    with turn(work):
        return {
            label: answered(llm, sampling, prompts[label], method != "none") for label in prompts
        }


@contextmanager
def turn(work: Path) -> Iterator[None]:
    """Nobody else answers meanwhile."""
    with (work / ".turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def answered(llm: Any, sampling: Any, prompts: list[list[int]], drafted: bool) -> Json:
    asks = [{"prompt_token_ids": ids} for ids in prompts]
    llm.generate(asks[:1], sampling, use_tqdm=False)
    before, start = counters(llm), time.perf_counter()
    answers = [
        list(answer.outputs[0].token_ids) for answer in llm.generate(asks, sampling, use_tqdm=False)
    ]
    spent, after = time.perf_counter() - start, counters(llm)
    told = {"answers": answers, "tokens_per_second": round(sum(map(len, answers)) / spent, 1)}
    return told | (acceptance(before, after) if drafted else {})


def acceptance(before: Json, after: Json) -> Json:
    drafts = after["drafts"] - before.get("drafts", 0)
    earlier = before.get("per_position") or [0] * len(after["per_position"])
    shares = [(b - a) / drafts for a, b in zip(earlier, after["per_position"], strict=True)]
    length = 1 + (after["accepted"] - before.get("accepted", 0)) / drafts
    return {
        "acceptance_length": round(length, 4),
        "per_position": [round(share, 4) for share in shares],
    }


def run(work: Path, name: str, method: str, asked: argparse.Namespace, end: float) -> Json:
    """In a process of its own; what vLLM refuses is told by its last words."""
    left = end - time.monotonic()
    if left < 5:
        return {"failed": "no time left"}
    result = asked.out.with_suffix(f".{name}.{method}.part")
    result.unlink(missing_ok=True)
    command = [
        sys.executable,
        __file__,
        str(work),
        str(result),
        "--one",
        name,
        method,
        "--tokens",
        str(asked.tokens),
    ]
    command += ["-k", str(asked.k), *(["--eager"] if asked.eager else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer within {left:.0f} s"}
    if done.returncode or not result.is_file():
        return {"failed": last_words(done.stderr + done.stdout)}
    found = json.loads(result.read_text())
    result.unlink()
    return found


def last_words(text: str) -> str:
    errors = [
        line.strip() for line in text.splitlines() if "Error" in line and "Traceback" not in line
    ]
    return (errors or text.strip().splitlines() or ["no reason given"])[-1][-600:]


def agreement(plain: list[list[int]], other: list[list[int]]) -> Json:
    """How many answers are the same, and for how many tokens they are alike, in the mean."""
    alike = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in zip(plain, other, strict=True)
    ]
    same = sum(a == b for a, b in zip(plain, other, strict=True))
    return {"same": same, "of": len(plain), "alike_for": round(sum(alike) / len(alike), 1)}


def told(results: dict[tuple[str, str], Json], asked: argparse.Namespace) -> Json:
    """Without the answers: each beside bf16's, drafted ones beside `none`'s of their own format."""
    cells = []
    for (name, method), sets in results.items():
        if "failed" in sets:
            cells.append({"format": name, "method": method, "failed": sets["failed"]})
            continue
        for label, found in sets.items():
            cell = {"format": name, "method": method, "set": label}
            cell |= {key: value for key, value in found.items() if key != "answers"}
            for key, other in {"as_bf16": ("bf16", method), "as_none": (name, "none")}.items():
                if label in results.get(other, {}) and other != (name, method):
                    cell[key] = agreement(results[other][label]["answers"], found["answers"])
            plain = results.get(("bf16", method), {}).get(label, {}).get("tokens_per_second")
            cells.append(
                cell | ({"of_bf16": round(found["tokens_per_second"] / plain, 3)} if plain else {})
            )
    how = {"tokens": asked.tokens, "k": asked.k, "eager": asked.eager, "at_once": asked.at_once}
    return how | {"cells": cells}


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
    parser.add_argument("--one", nargs=2)
    asked = parser.parse_args()
    if asked.one:
        asked.out.write_text(json.dumps(one(asked.work, *asked.one, asked)))
        return
    end, results = time.monotonic() + asked.seconds, dict[tuple[str, str], Json]()
    cells = [
        (name, method) for method in asked.methods.split(",") for name in asked.formats.split(",")
    ]
    with ThreadPoolExecutor(asked.at_once) as pool:
        running = {pool.submit(run, asked.work, *cell, asked, end): cell for cell in cells}
        for done in as_completed(running):
            results[running[done]] = done.result()
            asked.out.write_text(json.dumps(told(results, asked), indent=1))
            print(*running[done], results[running[done]].get("failed", "done"), flush=True)


if __name__ == "__main__":
    main()
