"""Time the choice of tokens on a GPU: many rows, by sampling option.

    python -m benchmarks.kernels.sampling [--requests 64] [--rows 8] [--vocabulary 49152]

Milliseconds of one step's sampling with the kernel that draws tokens, and with its reference in
PyTorch, which stores the cumulative distribution of every row; and whether both choose the same.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from peagle.core import Sampling
from peagle.engine.sampling import sampler as sampler_module
from peagle.engine.sampling.sampler import Sampler
from peagle.engine.sampling.sampling_state import SamplingState
from peagle.kernels.triton.draw_tokens import draw_tokens, reference

REPEATS = 20
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top-p": {"top_p": 0.95},
    "top-k": {"top_k": 50},
    "min-p": {"min_p": 0.05},
}


def milliseconds(run: Callable[[], Tensor]) -> float:
    run()
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(REPEATS):
        run()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start) / REPEATS


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=49152)
    options = parser.parse_args()
    shape = (options.requests, options.rows, options.vocabulary)
    logits = (3 * torch.randn(shape, device="cuda")).bfloat16()
    drafts = torch.zeros(options.requests, options.rows - 1, dtype=torch.long, device="cuda")
    emitted = torch.zeros(options.requests, dtype=torch.int32, device="cuda")
    for name, extra in OPTIONS.items():
        states = [
            SamplingState(
                Sampling(temperature=0.8, seed=i, **extra),
                [1, 2, 3],
                256,
                vocab=options.vocabulary,
                device="cuda",
            )
            for i in range(options.requests)
        ]
        sampler = Sampler(states, options.rows)
        results = []
        for draw in (draw_tokens, reference):
            vars(sampler_module)["draw_tokens"] = draw
            tokens = sampler.choose(logits, drafts, emitted)
            spent = milliseconds(lambda: sampler.choose(logits, drafts, emitted))  # noqa: B023
            results.append((tokens, spent))
        (tokens, spent), (other_tokens, other_spent) = results
        equal = torch.equal(tokens, other_tokens)
        print(f"{name}: {spent:.2f} ms, reference {other_spent:.2f} ms, equal {equal}", flush=True)


if __name__ == "__main__":
    main()
