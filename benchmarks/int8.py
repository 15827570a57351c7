"""What int8 costs and gives on this CPU: the shipped pair, real prompts, beside bf16 in the same run.

    python -m tests.measure_int8 DATA [PROMPTS]     DATA: the folder with humaneval.jsonl, mt_bench.jsonl, gsm8k.jsonl

Greedy answers of 96 tokens in exact mode: how many are the same, and where the others part; along the bf16 answers, the
KL divergence of the int8 target's distribution from the bf16 target's, per token; the acceptance length and tokens a
second of p-eagle with K=7, one request at a time.
"""

import sys
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from peagle.bench.step_cost import measure_prompts
from peagle.data.bench import read_sets
from peagle.engine import Engine, EngineConfig
from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model.verifier import target_kv_shapes
from peagle.kernels.row_pass import RowPass
from peagle.loaded import LoadedPair, load

SETS, TOKENS, PAGE = ("humaneval", "mt_bench", "gsm8k"), 96, 64


def answers(pair: LoadedPair, prompts: list[list[int]], method: str, int8: bool) -> list[list[int]]:
    return [
        pair.generate(ids, method=method, max_tokens=TOKENS, exact=True, int8=int8).token_ids
        for ids in prompts
    ]


@torch.inference_mode()
def distribution(engine: Engine, ids: list[int]) -> Tensor:
    """[tokens, vocabulary] log-probabilities of a whole text, in one pass."""
    pages = -(-len(ids) // PAGE)
    memory = KVCache(target_kv_shapes(engine.target), pages, PAGE, torch.device("cpu"))
    at, one = torch.arange(len(ids)), torch.tensor([len(ids)]).int()
    rows = RowPass(at, at, torch.arange(pages)[None].int(), one * 0, one, one * 0, len(ids), PAGE)
    return (
        engine.loop.stepper.verifier.forward(torch.tensor(ids), rows, memory)[0]
        .float()
        .log_softmax(-1)
    )


def divergence(pair: LoadedPair, texts: list[tuple[list[int], list[int]]]) -> tuple[float, float]:
    """Over the answers' tokens: the mean KL, and the share of tokens that stay the likeliest."""
    plain, small = (
        Engine(pair, EngineConfig(method="none", max_batch=1, kv_tokens=1024, int8=i, thread=False))
        for i in (False, True)
    )
    apart, same = [], []
    for ids, answer in texts:
        p, q = (distribution(engine, ids + answer)[len(ids) - 1 : -1] for engine in (plain, small))
        apart.append((p.exp() * (p - q)).sum(-1))
        same.append((p.argmax(-1) == q.argmax(-1)).float())
    return float(torch.cat(apart).mean()), float(torch.cat(same).mean())


def main(data: str, count: str = "16") -> None:
    pair = load(dtype="bfloat16", device="cpu")
    for name in SETS:
        tasks = read_sets([name], Path(data), int(count))[name]
        prompts = [pair.encode([{"role": "user", "content": task.turns[0]}]) for task in tasks]
        plain, small = (answers(pair, prompts, "none", int8) for int8 in (False, True))
        lossless = answers(pair, prompts, "p-eagle", True) == small
        alike = [
            next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
            for a, b in zip(plain, small, strict=True)
        ]
        equal = sum(a == b for a, b in zip(plain, small, strict=True)) / len(prompts)
        kl, same = divergence(pair, list(zip(prompts, plain, strict=True)))
        cells = [
            measure_prompts(pair, "p-eagle", 7, 1, prompts, TOKENS, 1, int8=int8)
            for int8 in (False, True)
        ]
        lengths, speeds = [c.acceptance_length for c in cells], [c.tokens_per_second for c in cells]
        print(
            f"{name:10} the same {equal:.0%}, alike for {mean(alike):.0f} tokens; KL {kl:.4f},"
            f" likeliest kept {same:.1%}; acceptance length {lengths[0]:.2f} -> {lengths[1]:.2f};"
            f" tokens/s {speeds[1] / speeds[0]:.2f} of bf16; p-eagle == none: {lossless}",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
