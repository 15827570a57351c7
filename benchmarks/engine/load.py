"""The engine in process, under the load that benchmarks/server/stream_load.py sends to a server.

    python -m benchmarks.engine.load < job.json

A job: `settings` of a server, whose main engine is built; `prompts` (texts or token ids), `tokens`
of each answer, and `levels`: for each number of streams, how many requests are sent. One line of
JSON is printed for each level.
"""

import json
import sys
import time
from typing import Any

from peagle.engine import Engine
from peagle.engine.stream import Stream
from peagle.server.engines.engine_factory import EngineFactory
from peagle.server.settings import settings_from_json

Prompt = list[int]


def run_level(engine: Engine, prompts: list[Prompt], tokens: int, streams: int) -> dict[str, Any]:
    """Keep `streams` requests in the engine until all prompts are answered."""
    waiting = list(reversed(prompts))
    live: dict[Stream, float] = {}  # With the time at which each was added.
    first_ms: list[float] = []
    has_tokens = set[str]()
    generated = 0
    started = time.perf_counter()
    cpu = time.process_time()
    while waiting or live:
        while waiting and len(live) < streams:
            stream = engine.add(waiting.pop(), max_tokens=tokens, ignore_eos=True, detokenize=False)
            live[stream] = time.perf_counter()
        engine.step()
        for stream in list(live):
            for piece in stream.poll():
                generated += len(piece.step.tokens) if piece.step else 0
                if piece.step and stream.id not in has_tokens:
                    has_tokens.add(stream.id)
                    first_ms.append(1000 * (time.perf_counter() - live[stream]))
            if stream.ended:
                del live[stream]
    seconds = time.perf_counter() - started
    first_ms.sort()
    return {
        "streams": streams,
        "tokens_per_second": round(generated / seconds, 1),
        "seconds": round(seconds, 3),
        "cpu_seconds": round(time.process_time() - cpu, 3),
        "ttft_p50_ms": round(first_ms[len(first_ms) // 2], 1),
        "ttft_p99_ms": round(first_ms[int(0.99 * len(first_ms))], 1),
    }


def main() -> None:
    job = json.load(sys.stdin)
    started = time.perf_counter()
    factory = EngineFactory(settings_from_json(json.dumps(job["settings"])))
    factory.load()
    engine = factory.build_main()
    while engine.capture_next():
        pass
    ready = {"ready_seconds": round(time.perf_counter() - started, 1)}
    print(json.dumps(ready | {"startup": engine.startup.as_dict()}), flush=True)
    assert factory.pair is not None
    prompts = [encode(factory.pair, prompt) for prompt in job["prompts"]]
    for streams, count in job["levels"]:
        # As server/h200.py does: the first requests of a level capture graphs.
        warm_up = [prompts[i % len(prompts)] for i in range(2 * streams)]
        run_level(engine, warm_up, job["warm_up_tokens"], streams)
        repeated = [prompts[i % len(prompts)] for i in range(count)]
        print(json.dumps(run_level(engine, repeated, job["tokens"], streams)), flush=True)
    engine.close()


def encode(pair: Any, prompt: str | Prompt) -> Prompt:
    if isinstance(prompt, list):
        return prompt
    return list(pair.encode([{"role": "user", "content": prompt}]))


if __name__ == "__main__":
    main()
