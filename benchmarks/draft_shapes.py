"""What each form of drafts is worth: chains, a tree and automatic form beside plain decoding, one request at a time.

    python -m tests.measure_forms DATA [TOKENS [PROMPTS]]      # DATA: the folder with humaneval.jsonl

All engines run in turns, three times; the first time warms them up, of the others the faster one counts.
"""

import sys
import time
from pathlib import Path
from typing import Any

from peagle.data.bench import read_sets
from peagle.engine import Engine, EngineConfig
from peagle.loaded import load

FORMS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    **{f"K={k}": {"k": k, "tree": 0} for k in (3, 5, 7)},
    "tree 15, K=7": {"k": 7, "tree": 15},
    "tree 31, K=7": {"k": 7, "tree": 31},
    "automatic, chains": {"tree": 0},
    "automatic, trees": {"tree": 31},
}


def main(data: str, tokens: int = 64, prompts: int = 8) -> None:
    pair = load()
    tasks = read_sets(["humaneval"], Path(data), prompts)["humaneval"]
    asked = [pair.encode(task.turns[0]) for task in tasks]
    room = max(map(len, asked)) + tokens + 128
    engines = {
        name: Engine(
            pair,
            EngineConfig(max_batch=1, kv_tokens=room, thread=False, prefix_caching=False, **how),
        )
        for name, how in FORMS.items()
    }
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(3):
        for name, engine in engines.items():
            before, start = engine.metrics.generated_tokens, time.perf_counter()
            for ids in asked:
                engine.add(ids, max_tokens=tokens)
                engine.drain()
            rates[name].append(
                (engine.metrics.generated_tokens - before) / (time.perf_counter() - start)
            )
    plain = max(rates["none"][1:])
    for name, engine in engines.items():
        best, steps = max(rates[name][1:]), dict(engine.metrics.k_steps.most_common(4))
        length = engine.metrics.acceptance_length
        print(
            f"{name:18} {best:8.1f} tokens/s  x {best / plain:.2f}  acceptance length {length:.2f}  nodes {steps}"
        )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
