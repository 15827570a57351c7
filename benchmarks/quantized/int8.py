"""Measure costs and gains of int8 on this CPU: the default pair, real prompts, against bf16.

    python -m benchmarks.quantized.int8 DATA [PROMPTS]     # DATA: the folder with humaneval.jsonl,
                                                 # mt_bench.jsonl and gsm8k.jsonl

For each set it prints, of greedy answers of 96 tokens in exact mode, how many are identical and
after how many tokens the others differ; along the bf16 answers, the KL divergence per token of the
int8 target's distribution from the bf16 target's; and the acceptance length and the tokens per
second of p-eagle with K=7, one request at a time.
"""

import sys
from pathlib import Path
from statistics import mean

import torch

from benchmarks.engine.scoring import score
from peagle.bench.step_cost import measure_prompts
from peagle.data.bench import read_sets
from peagle.engine import Engine, EngineConfig
from peagle.loaded import LoadedPair, load

SETS = ("humaneval", "mt_bench", "gsm8k")
MAX_TOKENS = 96


def generate_answers(
    pair: LoadedPair, prompts: list[list[int]], method: str, int8: bool
) -> list[list[int]]:
    return [
        pair.generate(ids, method=method, max_tokens=MAX_TOKENS, exact=True, int8=int8).token_ids
        for ids in prompts
    ]


def divergence(pair: LoadedPair, texts: list[tuple[list[int], list[int]]]) -> tuple[float, float]:
    """Over the answers' tokens: the mean KL, and the share of tokens that stay the likeliest."""
    bf16, int8 = (
        Engine(
            pair,
            EngineConfig(method="none", max_batch=1, kv_tokens=1024, int8=quantized, thread=False),
        )
        for quantized in (False, True)
    )
    divergences = []
    agreeing = []
    for ids, answer in texts:
        p, q = (score(engine, ids + answer).log_softmax(-1) for engine in (bf16, int8))
        p, q = (x[len(ids) - 1 : -1] for x in (p, q))
        divergences.append((p.exp() * (p - q)).sum(-1))
        agreeing.append((p.argmax(-1) == q.argmax(-1)).float())
    return float(torch.cat(divergences).mean()), float(torch.cat(agreeing).mean())


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def main(data: str, num_prompts: str = "16") -> None:
    pair = load(dtype="bfloat16", device="cpu")
    for name in SETS:
        tasks = read_sets([name], Path(data), int(num_prompts))[name]
        prompts = [pair.encode([{"role": "user", "content": task.turns[0]}]) for task in tasks]
        bf16, int8 = (generate_answers(pair, prompts, "none", flag) for flag in (False, True))
        lossless = generate_answers(pair, prompts, "p-eagle", True) == int8
        prefixes = [common_prefix(a, b) for a, b in zip(bf16, int8, strict=True)]
        equal = sum(a == b for a, b in zip(bf16, int8, strict=True)) / len(prompts)
        kl, agreeing = divergence(pair, list(zip(prompts, bf16, strict=True)))
        before, after = (
            measure_prompts(pair, "p-eagle", 7, 1, prompts, MAX_TOKENS, 1, int8=flag)
            for flag in (False, True)
        )
        speed = after.tokens_per_second / before.tokens_per_second
        print(
            f"{name:10} identical {equal:.0%}, common prefix {mean(prefixes):.0f} tokens;"
            f" KL {kl:.4f}, same likeliest token {agreeing:.1%};"
            f" acceptance length {before.acceptance_length:.2f} -> {after.acceptance_length:.2f};"
            f" tokens/s {speed:.2f} of bf16; p-eagle == none: {lossless}",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
