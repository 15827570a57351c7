"""Count the answers that speculation leaves identical, with and without exact mode.

    python -m benchmarks.exact.flips cpu bfloat16 20 96  # device, dtype, prompts, tokens per answer

The results are in docs/lossless.md.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.engine import Engine, EngineConfig
from peagle.errors import UserError
from peagle.kernels.triton.build_tree import DraftTrees
from peagle.kernels.triton.expand_rows import VerifiedBlock
from peagle.loaded import LoadedPair, load

K = 7
WRONG_EVERY = 4  # of so many drafts, the last is wrong
PROMPTS = Path(__file__).parents[2] / "tests" / "support" / "prompts.txt"


def generate(engine: Engine, ids: list[int], max_tokens: int) -> list[int]:
    stream = engine.add(ids, max_tokens=max_tokens)
    engine.drain()
    return [token for piece in stream if piece.step for token in piece.step.tokens]


def draft_known_answer(engine: Engine, ids: list[int], expected: list[int]) -> None:
    """Replace the drafter by one that knows the answer: three drafts in four are right.

    The first drafts of a request come from its prefill, and so from the real drafter.
    """
    sequence = torch.tensor(ids + expected + [3] * (K + 1), device=engine.target.device)

    def draft(verified: VerifiedBlock, shape: DraftShape, slots: Tensor, trees: DraftTrees) -> None:
        newest = int(verified.first_positions[0] + verified.accepted_counts[0]) + 1  # position
        drafts = sequence[newest + 1 : newest + 1 + shape.k].clone()
        drafts[WRONG_EVERY - 1 :: WRONG_EVERY] += 1
        padded = torch.nn.functional.pad(drafts, (0, shape.k - len(drafts)))
        trees.chain[slots, : shape.k] = padded

    drafter = engine.loop.stepper.drafter
    assert drafter is not None
    drafter.draft = draft  # type: ignore[method-assign]


def first_difference(
    pair: LoadedPair, plain: Engine, drafted: Engine, text: str, max_tokens: int
) -> tuple[int, float] | None:
    """The index of the first token that differs, and the margin of the two best logits there.

    None: the answers are identical.
    """
    ids = pair.encode(text)
    expected = generate(plain, ids, max_tokens)
    draft_known_answer(drafted, ids, expected)
    answer = generate(drafted, ids, max_tokens)
    if answer == expected:
        return None
    index = next(
        (i for i, (a, b) in enumerate(zip(answer, expected, strict=False)) if a != b),
        min(len(answer), len(expected)),
    )
    prefix = torch.tensor(ids + expected[:index], device=pair.target.device)
    best = pair.target.forward(prefix, keep=1).logits[0].float().topk(2).values
    return index, round(float(best[0] - best[1]), 4)


def main(device: str, dtype: str, num_prompts: int, max_tokens: int) -> None:
    pair = load(device=device, dtype=dtype)
    texts = PROMPTS.read_text().splitlines()[:num_prompts]
    for exact in (False, True):
        options: dict[str, Any] = {"max_batch": 1, "kv_tokens": 4096, "exact": exact}
        options |= {"cuda_graphs": False, "thread": False}
        try:
            plain = Engine(pair, EngineConfig(method="none", k=K, **options))
            drafted = Engine(pair, EngineConfig(method="p-eagle", k=K, **options))
        except UserError as error:
            print(error)
            continue
        results = [first_difference(pair, plain, drafted, text, max_tokens) for text in texts]
        print(
            f"{device} {dtype} exact={exact}:"
            f" {results.count(None)} of {len(texts)} identical;"
            f" acceptance length {drafted.metrics.acceptance_length:.2f};"
            " first differences (token, margin):",
            [result for result in results if result],
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
