"""The default pair on its stored GGUF weights: concurrent requests against single ones.

A process has one level of the C kernels, so other levels run this file in a new process:
`python -m tests.support.engine.stored_answers 8 10 native`.
"""

import argparse
import os
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from peagle.catalog import find_pair
from peagle.engine import Engine, EngineConfig
from peagle.kernels.cpu.level import LEVEL_VARIABLE
from peagle.kernels.cpu.library import kernel_build
from peagle.loaded import LoadedPair
from peagle.paths import STORED_FILE
from peagle.pull import pull
from peagle.target import load_target
from tests.support.engine.decoding import tokens_of
from tests.support.engine.engines import steps_of

PROMPTS = (Path(__file__).parents[1] / "prompts.txt").read_text().splitlines()
DRAFTING: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "a chain": {"method": "p-eagle", "k": 7},
    "a tree": {"method": "p-eagle", "k": 7, "tree": 31},
    "adaptive trees": {"method": "p-eagle", "k": "auto", "tree": 31},
}


def stored_file() -> Path:
    """The GGUF file of the default pair, downloaded if necessary."""
    return pull(find_pair("smollm2-135m"), complete=True) / STORED_FILE


@cache
def stored_pair() -> LoadedPair:
    """The pair with stored weights, built once per process."""
    folder = stored_file().parent
    target = load_target(folder, torch.float32, "cpu", "smollm2-135m", stored=True)
    return LoadedPair(find_pair("smollm2-135m"), target)


def engine_for(pair: LoadedPair, max_batch: int, **options: Any) -> Engine:
    kv_tokens = max_batch * 256
    config = EngineConfig(max_batch=max_batch, kv_tokens=kv_tokens, thread=False, **options)
    engine = Engine(pair, config)
    assert engine.weights == "int8" if config.int8 else engine.weights.startswith("Q4_1")
    return engine


def answers(engine: Engine, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """The answers; some requests are added while others run."""
    rng, streams = random.Random(0), []
    for ids in prompts:
        streams.append(engine.add(ids, max_tokens=tokens, ignore_eos=True))
        for _ in range(rng.choice([0, 0, 1])):
            engine.step()
    engine.drain()
    engine.check_integrity()
    return [tokens_of(steps_of(stream)) for stream in streams]


def check_answers(count: int, tokens: int, int8: bool = False) -> None:
    """Concurrent requests have the answers of single ones, with every drafting method."""
    pair = stored_pair()
    texts = [f"{PROMPTS[i % len(PROMPTS)]} ({i})" for i in range(count)]
    prompts = [pair.encode(text) for text in texts]
    # It stays open, because the other engines share its packed weights.
    with engine_for(pair, 1, method="none", prefix_caching=False, int8=int8) as plain:
        expected = [answers(plain, [ids], tokens)[0] for ids in prompts]
        assert all(len(answer) == tokens for answer in expected)
        assert len({tuple(answer) for answer in expected}) > min(count, len(PROMPTS)) // 2
        for name, options in DRAFTING.items():
            with engine_for(pair, count, int8=int8, **options) as engine:
                result = answers(engine, prompts, tokens)
            wrong = [i for i in range(count) if result[i] != expected[i]]
            assert not wrong, f"{name}: the answers {wrong} differ"


def check_in_process(level: str, count: int, tokens: int, int8: bool = False) -> None:
    """Run `check_answers` at another level."""
    command = [sys.executable, "-m", __name__, str(count), str(tokens), level]
    done = subprocess.run(
        [*command, *(["--int8"] if int8 else [])],
        env=os.environ | {LEVEL_VARIABLE: level, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("tokens", type=int)
    parser.add_argument("level")
    parser.add_argument("--int8", action="store_true")
    options = parser.parse_args()
    built = kernel_build()
    assert built is not None and built.level == options.level
    check_answers(options.count, options.tokens, options.int8)


if __name__ == "__main__":
    main()
