"""The engine in process, under the load that benchmarks/stream_load.py sends to a server.

    python -m benchmarks.engine_load < job.json

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
    live: list[Stream] = []
    generated = 0
    started = time.perf_counter()
    while waiting or live:
        while waiting and len(live) < streams:
            live.append(engine.add(waiting.pop(), max_tokens=tokens, ignore_eos=True))
        engine.step()
        for stream in list(live):
            pieces = stream.poll()
            generated += sum(len(piece.step.tokens) for piece in pieces if piece.step)
            if stream.ended:
                live.remove(stream)
    seconds = time.perf_counter() - started
    return {"streams": streams, "tokens_per_second": round(generated / seconds, 1)}


def main() -> None:
    job = json.load(sys.stdin)
    started = time.perf_counter()
    factory = EngineFactory(settings_from_json(json.dumps(job["settings"])))
    factory.load()
    engine = factory.build_main()
    while engine.capture_next():
        pass
    print(json.dumps({"ready_seconds": round(time.perf_counter() - started, 1)}), flush=True)
    assert factory.pair is not None
    prompts = [encode(factory.pair, prompt) for prompt in job["prompts"]]
    run_level(engine, prompts[:8], 16, 4)  # The first steps are slower.
    for streams, count in job["levels"]:
        repeated = [prompts[i % len(prompts)] for i in range(count)]
        print(json.dumps(run_level(engine, repeated, job["tokens"], streams)), flush=True)
    engine.close()


def encode(pair: Any, prompt: str | Prompt) -> Prompt:
    if isinstance(prompt, list):
        return prompt
    return list(pair.encode([{"role": "user", "content": prompt}]))


if __name__ == "__main__":
    main()
