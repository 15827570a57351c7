"""Compare batched answers with plain decoding: 64 real requests of mixed length and arrival.

    python -m benchmarks.engine.batch DATA cuda bfloat16    # DATA: the folder with humaneval.jsonl

Plain decoding is the reference loop `peagle.reference.decode`, one request at a time, without
drafts. The engine runs without exact mode. Where an answer differs from plain decoding, the margin
is printed: how much higher the target's logit of its own token is than that of the token in the
answer.
"""

import random
import sys
import time
from pathlib import Path

import torch

from peagle.core import Sampling
from peagle.data.bench import read_sets
from peagle.engine import Engine, EngineConfig
from peagle.engine.stream import Stream
from peagle.loaded import LoadedPair, load
from peagle.reference.decode import decode

NUM_REQUESTS = 64
FIRST_REQUESTS = 16  # requests that are added before the first step
METHODS: tuple[tuple[str, int | str], ...] = (
    ("none", 1),
    ("eagle3", 5),
    ("p-eagle", 7),
    ("p-eagle", "auto"),
)
Request = tuple[list[int], int]  # prompt, maximum of new tokens


def decode_alone(pair: LoadedPair, ids: list[int], max_tokens: int) -> list[int]:
    steps = decode(pair.target, None, ids, 0, max_tokens, Sampling(), pair.target.stop_ids)
    return [token for step in steps for token in step.tokens]


def decode_batched(engine: Engine, requests: list[Request]) -> list[list[int]]:
    """Add some requests at the beginning, then one more every other step."""
    waiting = list(requests)
    streams: list[Stream] = []
    while waiting or engine.loop.scheduler.live:
        for _ in range(FIRST_REQUESTS if not streams else 1):
            if waiting:
                ids, max_tokens = waiting.pop(0)
                streams.append(engine.add(ids, max_tokens=max_tokens))
        engine.step()
        engine.step()
    engine.drain()
    return [
        [token for piece in stream if piece.step for token in piece.step.tokens]
        for stream in streams
    ]


@torch.inference_mode()
def first_difference(
    pair: LoadedPair, ids: list[int], expected: list[int], answer: list[int]
) -> tuple[int, float]:
    """The index of the first token that differs, and the difference of the two logits there."""
    tokens = zip(expected, answer, strict=False)
    index = next(i for i, (a, b) in enumerate(tokens) if a != b)
    prefix = torch.tensor(ids + expected[:index], device=pair.target.device)
    logits = pair.target.forward(prefix, keep=1).logits[0].float()
    return index, round(float(logits[expected[index]] - logits[answer[index]]), 4)


def read_requests(pair: LoadedPair, data: Path) -> list[Request]:
    rng = random.Random(0)
    sets = read_sets(["humaneval", "gsm8k"], data, NUM_REQUESTS // 2)
    texts = [task.turns[0] for tasks in sets.values() for task in tasks]
    rng.shuffle(texts)
    return [
        (pair.encode([{"role": "user", "content": text}]), rng.randint(8, 64)) for text in texts
    ]


def main(data: str, device: str, dtype: str) -> None:
    pair = load(device=device, dtype=dtype)
    requests = read_requests(pair, Path(data))
    expected = [decode_alone(pair, *request) for request in requests]
    plain: list[list[int]] = []  # batched, without drafts
    for method, k in METHODS:
        started = time.perf_counter()
        config = EngineConfig(
            method=method,
            k=k,
            max_batch=NUM_REQUESTS,
            context=2048,
            kv_tokens=NUM_REQUESTS * 512,
            exact=False,
            thread=False,
        )
        engine = Engine(pair, config)
        engine.warm_up()
        ready = time.perf_counter() - started
        answers = decode_batched(engine, requests)
        engine.check_integrity()
        plain = plain or answers
        differences = [
            first_difference(pair, ids, a, b)
            for (ids, _), a, b in zip(requests, expected, answers, strict=True)
            if a != b
        ]
        as_plain = sum(a == b for a, b in zip(plain, answers, strict=True))
        print(
            f"{device} {dtype} {method} K={k}:"
            f" {len(requests) - len(differences)} of {len(requests)} identical,"
            f" {as_plain} identical to batched `none`;"
            f" {sum(map(len, answers))} tokens, ready in {ready:.1f} s;"
            f" first differences (token, margin): {sorted(differences, key=lambda x: -x[1])}",
            flush=True,
        )
        engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:4])
