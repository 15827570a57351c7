"""Acceptance lengths with the drafter in bf16 and in int8, on the weights as stored.

    python -m benchmarks.quantized.int8_drafter DATA [--limit 16] [--tokens 96]

DATA is the folder with the benchmark sets. The drafter of stored weights multiplies in int8
(engine/step/stepper.py); here it also runs without that.
"""

import argparse
from pathlib import Path
from unittest.mock import patch

from peagle.data.bench import read_sets
from peagle.engine import Engine, EngineConfig
from peagle.engine.model.drafting import DraftRunner
from peagle.loaded import LoadedPair, load

SETS = ("humaneval", "mt_bench", "gsm8k")


def acceptance_length(pair: LoadedPair, prompts: list[str], tokens: int) -> float:
    config = EngineConfig(
        method="p-eagle", k=7, max_batch=16, context=2048, kv_tokens=16384, thread=False
    )
    with Engine(pair, config) as engine:
        streams = [engine.add(prompt, max_tokens=tokens) for prompt in prompts]
        engine.drain()
        steps = [piece.step for stream in streams for piece in stream.poll() if piece.step]
    return sum(len(step.tokens) for step in steps) / len(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    pair = load(device="cpu")
    assert pair.target.stored_format is not None, "the target does not run as stored"
    print("| set | drafter in bf16 | in int8 |\n|---|--:|--:|")
    for name, tasks in read_sets(list(SETS), options.data, options.limit).items():
        prompts = [task.turns[0] for task in tasks]
        in_int8 = acceptance_length(pair, prompts, options.tokens)
        with patch.object(DraftRunner, "quantize", lambda self: None):
            in_bf16 = acceptance_length(pair, prompts, options.tokens)
        print(f"| {name} | {in_bf16:.2f} | {in_int8:.2f} |", flush=True)


if __name__ == "__main__":
    main()
