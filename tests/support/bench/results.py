"""Result files of `peagle bench` with plausible artificial numbers."""

import json
from pathlib import Path
from typing import Any

SETS = {"humaneval": 1.06, "mt_bench": 0.93, "gsm8k": 1.0}  # Factors of the acceptance of drafts.
RATES = {"p-eagle": 0.77, "eagle3": 0.81}  # Acceptance of the first position; later ones have less.
# The cost of drafting in target passes.
DRAFTING = {"p-eagle": lambda k: 0.16 + 0.012 * k, "eagle3": lambda k: 0.11 * k}
CPU = {
    "cpu": "AMD EPYC 9R14",
    "cores": 16,
    "threads": 16,
    "gpu": None,
    "platform": "Linux-6.1",
    "torch": "2.11.0",
}
GPU = {
    "cpu": "Intel Xeon",
    "cores": 16,
    "threads": 16,
    "gpu": "NVIDIA H200",
    "cuda": "13.0",
    "driver": "580.65",
}


def rates(method: str, k: int, factor: float) -> list[float]:
    shares = []
    share = 1.0
    for i in range(k):
        share *= min(0.97, RATES[method] * factor - 0.012 * i)
        shares.append(round(share, 4))
    return shares


def cell(
    set_: str, method: str, k: int | str, c: int, gpu: bool = False, noise: float = 0.02
) -> dict[str, Any]:
    depth = 0 if method == "none" else 7 if k == "auto" else int(k)
    accepted = rates(method, depth, SETS.get(set_, 1.0)) if depth else []
    length = 1 + sum(accepted)
    free = 220 if gpu else 24  # Rows of a pass before its cost rises.
    step = (
        (4.2 if gpu else 31.0)
        * (1 + c * (depth + 1) / free)
        * (1 + (DRAFTING[method](depth) if depth else 0))
    )
    speed = c * length / step * 1000 * 0.97
    wobble = [1 - noise, 1.0, 1 + noise * (0.5 + (digest(set_, method, k, c) % 7) / 10)]
    runs = [round(speed * w, 2) for w in wobble]
    tpot = c * 1000 / speed
    content = {
        "set": set_,
        "method": method,
        "k": k,
        "concurrency": c,
        "requests": 80,
        "failed": 0,
        "first_error": None,
        "repeats": 3,
        "duration": round(80 * 256 / speed, 2),
        "total_output_tokens": 80 * 256,
        "output_throughput": runs[1],
        "output_throughput_runs": runs,
        "output_throughput_spread": [min(runs), max(runs)],
        "request_throughput": round(speed / 256, 3),
        "per_user_throughput": round(speed / c, 2),
        "step_ms": round(step, 3),
        "drafter_share": round(1 - 1 / (1 + DRAFTING[method](depth)), 3) if depth else None,
        "spec_decode_acceptance_rate": round(100 * sum(accepted) / depth, 2) if depth else None,
        "spec_decode_acceptance_length": round(length, 3) if depth else None,
        "spec_decode_per_position_acceptance_rates": accepted or None,
        "k_steps": {str(depth): 1200},
        "gpu_memory_bytes": 9 * 2**30 + c * 2**26 if gpu else None,
        "energy_joules": 4200.0 if gpu else None,
        "joules_per_token": round(420 / speed, 4) if gpu else None,
        "check": None if method == "none" else {"compared": 80, "identical": 80, "differences": []},
    }
    for what, middle in (("ttft", step * 3 + c), ("tpot", tpot), ("itl", step)):
        for kind, factor in (("mean", 1.0), ("median", 0.96), ("p99", 1.8)):
            content[f"{kind}_{what}_ms"] = round(middle * factor, 3)
    return content


def digest(*parts: object) -> int:
    return sum(ord(letter) for letter in "".join(map(str, parts)))


def result(
    name: str = "run",
    sets: tuple[str, ...] = ("humaneval",),
    ks: tuple[int | str, ...] = (3, 7),
    concurrency: tuple[int, ...] = (1, 8, 64),
    methods: tuple[str, ...] = ("none", "eagle3", "p-eagle"),
    gpu: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    cells = [
        cell(set_, method, k, c, gpu)
        for set_ in sets
        for c in concurrency
        for method in methods
        for k in ((0,) if method == "none" else ks)
    ]
    scores = [
        {
            "set": set_,
            "method": method,
            "k": 0 if method == "none" else 7,
            "metric": "pass@1",
            "value": 0.171,
            "of": 164,
        }
        for set_ in sets
        if set_ == "humaneval"
        for method in methods
    ]
    settings = {
        "sets": list(sets),
        "methods": list(methods),
        "k": list(ks),
        "concurrency": list(concurrency),
    }
    return {
        "format": "peagle-bench/1",
        "name": name,
        "created": "2026-11-15T12:00:00+00:00",
        "command": f"peagle bench smollm2-135m --set {','.join(sets)} --out results",
        "pair": "smollm2-135m",
        "engine": "native",
        "endpoint": None,
        "target": {
            "name": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "revision": None,
            "dtype": "bfloat16",
            "sha": "12ab",
        },
        "drafters": {"p-eagle": {"trained": True}, "eagle3": {"trained": True}},
        "environment": {"peagle": "0.1.0", "commit": "9e74c08", "python": "3.12.3"}
        | (GPU if gpu else CPU),
        "settings": settings
        | {"max_tokens": 256, "repeats": 3, "limit": 80, "temperature": 0.0, "seed": 0},
        "cells": cells,
        "scores": scores,
    } | changes


def write(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{content['name']}.json"
    path.write_text(json.dumps(content))
    return path
