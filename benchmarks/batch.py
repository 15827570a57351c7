"""64 real requests of mixed length and arrival at once: does each answer equal that of the plain loop, alone?

    PYTHONPATH=. python tests/measure_batch.py DATA cuda bfloat16      DATA: the folder with humaneval.jsonl

The plain loop is `peagle.decode`, one request at a time, without drafts. Where an answer leaves it, the margin is told:
how much more the target, alone, gives its own token than the one that was said.
"""

import random
import sys
import time
from pathlib import Path

import torch

from peagle.core import Sampling
from peagle.data.bench import read_sets
from peagle.engine import Engine, EngineConfig
from peagle.loaded import LoadedPair, load
from peagle.reference.decode import decode

COUNT, AT_ONCE = 64, 16  # requests; those that are there from the beginning


def alone(pair: LoadedPair, ids: list[int], count: int) -> list[int]:
    steps = decode(pair.target, None, ids, 0, count, Sampling(), pair.target.stop_ids)
    return [token for step in steps for token in step.tokens]


def together(engine: Engine, requests: list[tuple[list[int], int]]) -> list[list[int]]:
    """Some at the beginning, then one more every other step."""
    waiting, streams = list(requests), []
    while waiting or engine.loop.scheduler.live:
        for _ in range(AT_ONCE if not streams else 1):
            if waiting:
                ids, count = waiting.pop(0)
                streams.append(engine.add(ids, max_tokens=count))
        engine.step()
        engine.step()
    engine.drain()
    return [
        [token for piece in stream if piece.step for token in piece.step.tokens]
        for stream in streams
    ]


@torch.inference_mode()
def margin(
    pair: LoadedPair, ids: list[int], wanted: list[int], found: list[int]
) -> tuple[int, float]:
    """Where they part, and the difference of the two tokens' logits there."""
    at = next(i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b)
    prefix = torch.tensor(ids + wanted[:at], device=pair.target.device)
    logits = pair.target.forward(prefix, keep=1).logits[0].float()
    return at, round(float(logits[wanted[at]] - logits[found[at]]), 4)


def main(data: str, device: str, dtype: str) -> None:
    pair = load(device=device, dtype=dtype)
    rng = random.Random(0)
    tasks = read_sets(["humaneval", "gsm8k"], Path(data), COUNT // 2)
    texts = [task.turns[0] for found in tasks.values() for task in found]
    rng.shuffle(texts)
    requests = [
        (pair.encode([{"role": "user", "content": text}]), rng.randint(8, 64)) for text in texts
    ]
    wanted = [alone(pair, *request) for request in requests]
    plain: list[list[int]] = []
    for method, k in (("none", 1), ("eagle3", 5), ("p-eagle", 7), ("p-eagle", "auto")):
        start = time.perf_counter()
        engine = Engine(
            pair,
            EngineConfig(
                method=method,
                k=k,
                max_batch=COUNT,
                context=2048,
                kv_tokens=COUNT * 512,
                thread=False,
            ),
        )
        engine.warm_up()
        ready = time.perf_counter() - start
        found = together(engine, requests)
        engine.check_integrity()
        plain = plain or found
        parted = [
            margin(pair, ids, a, b)
            for (ids, _), a, b in zip(requests, wanted, found, strict=True)
            if a != b
        ]  # (token, margin)
        as_plain = sum(a == b for a, b in zip(plain, found, strict=True))
        print(
            f"{device} {dtype} {method} K={k}: {len(requests) - len(parted)} of {len(requests)} identical, {as_plain}"
            f" to `none` together; {sum(map(len, found))} tokens, ready in {ready:.1f} s;"
            f" where the others part (token, margin): {sorted(parted, key=lambda x: -x[1])}",
            flush=True,
        )
        engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:4])
