"""What a drafter costs while it drafts nothing, on a CPU: steps of `none` and of P-EAGLE, K = 0.

    python -m benchmarks.cpu.no_draft_steps DATA [--pair PAIR] [--requests 1,4] [--rounds 4]

DATA has mt_bench.jsonl. Rows of the drafter wait until a page of its KV cache is full
(engine/kv/deferred_rows.py); "every step" is the drafter behind every step. The engines run in
turn; a figure is the median over the rounds of the mean step.
"""

import argparse
import statistics
from pathlib import Path

from peagle.data.bench import read_sets
from peagle.draft_shape import NO_DRAFT
from peagle.engine import Engine, EngineConfig
from peagle.engine.policy.draft_policy import FixedPolicy
from peagle.loaded import LoadedPair, load

TOKENS = 96


def engine_without_drafts(pair: LoadedPair, defer: bool) -> Engine:
    """P-EAGLE with K = 0."""
    engine = Engine(pair, EngineConfig(method="p-eagle", thread=False, ngram=False))
    engine.loop.drafts.policy = FixedPolicy(NO_DRAFT)
    if not defer:
        engine.loop.stepper.deferred_rows = None
    return engine


def run(engine: Engine, prompts: list[str], salt: str) -> tuple[float, float]:
    """Seconds of a mean decode step, and of all prefills. The salt forbids cached prefixes."""
    metrics = engine.metrics
    before = (metrics.step_seconds, metrics.steps, metrics.prefill_seconds)
    for prompt in prompts:
        engine.add(prompt, max_tokens=TOKENS, ignore_eos=True, cache_salt=salt)
    engine.drain()
    seconds = metrics.step_seconds - before[0]
    return seconds / (metrics.steps - before[1]), metrics.prefill_seconds - before[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--pair", default="qwen2.5-coder-0.5b")
    parser.add_argument("--requests", default="1,4")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    pair = load(options.pair)
    none = Engine(pair, EngineConfig(method="none", thread=False))
    engines = {
        "none": none,
        "every step": engine_without_drafts(pair, defer=False),
        "once a page": engine_without_drafts(pair, defer=True),
    }
    print(f"{options.pair}, {none.status()['kernels']}\n")
    print("| requests | the drafter runs | ms a step | over `none` | ms of prefills |")
    print("|--:|---|--:|--:|--:|")
    for count in map(int, options.requests.split(",")):
        tasks = read_sets(["mt_bench"], options.data, count)["mt_bench"]
        prompts = [task.turns[0] for task in tasks]
        rounds = [
            {name: run(engine, prompts, f"{count} {i}") for name, engine in engines.items()}
            for i in range(options.rounds)
        ]
        base = statistics.median(each["none"][0] for each in rounds)
        for name in engines:
            step, prefill = (statistics.median(each[name][i] for each in rounds) for i in (0, 1))
            label = "-" if name == "none" else name
            cells = f"{1e3 * step:.1f} | {step / base - 1:+.1%} | {1e3 * prefill:.0f}"
            print(f"| {count} | {label} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
