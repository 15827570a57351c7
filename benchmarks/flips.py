"""How many answers does speculation leave identical, with and without exact mode? (docs/lossless.md has the results)

PYTHONPATH=. python tests/measure_flips.py cpu bfloat16 20 96
"""

import sys
from pathlib import Path

import torch

THREADS = torch.get_num_threads()  # the tests' conftest takes one

from peagle.engine import Engine, EngineConfig  # noqa: E402
from peagle.engine.model.drafting import VerifiedRows  # noqa: E402
from peagle.errors import UserError  # noqa: E402
from peagle.loaded import LoadedPair, load  # noqa: E402

WRONG = 4  # every so many-th draft


def answer(engine: Engine, ids: list[int], count: int) -> list[int]:
    stream = engine.add(ids, max_tokens=count)
    engine.drain()
    return [token for piece in stream if piece.step for token in piece.step.tokens]


def knowing(engine: Engine, ids: list[int], expected: list[int]) -> None:
    """From now on the drafter knows the answer: three drafts in four are right."""
    sequence = torch.tensor(ids + expected + [3] * 8, device=engine.target.device)

    def draft(verified: VerifiedRows, k: int) -> torch.Tensor:
        newest = int(verified.first[0] + verified.accepted[0]) + 1  # its position
        drafts = sequence[newest + 1 : newest + 1 + k].clone()
        drafts[WRONG - 1 :: WRONG] += 1
        return torch.nn.functional.pad(drafts, (0, k - len(drafts)))[None]

    assert engine.loop.stepper.drafter is not None
    engine.loop.stepper.drafter.draft = draft  # type: ignore[method-assign]


def first_difference(
    pair: LoadedPair, plain: Engine, drafted: Engine, text: str, count: int
) -> tuple[int, float] | None:
    """(token, top-2 logit margin there) where the drafted answer leaves the plain one; None: it does not."""
    ids = pair.encode(text)
    expected = answer(plain, ids, count)
    knowing(drafted, ids, expected)
    found = answer(drafted, ids, count)
    if found == expected:
        return None
    at = next(
        (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b),
        min(len(found), len(expected)),
    )
    prefix = torch.tensor(ids + expected[:at], device=pair.target.device)
    best = pair.target.forward(prefix, keep=1).logits[0].float().topk(2).values
    return at, round(float(best[0] - best[1]), 4)


def main(device: str, dtype: str, prompts: int, count: int) -> None:
    torch.set_num_threads(THREADS)
    pair = load(device=device, dtype=dtype)
    texts = (
        (Path(__file__).parents[1] / "tests" / "support" / "prompts.txt")
        .read_text()
        .splitlines()[:prompts]
    )
    for exact in (False, True):
        how = {
            "max_batch": 1,
            "kv_tokens": 4096,
            "exact": exact,
            "cuda_graphs": False,
            "thread": False,
        }
        try:
            plain, drafted = (
                Engine(pair, EngineConfig(method=method, k=7, **how))
                for method in ("none", "p-eagle")
            )
        except UserError as error:
            print(error)
            continue
        found = [first_difference(pair, plain, drafted, text, count) for text in texts]
        accepted = drafted.metrics.acceptance_length
        print(
            f"{device} {dtype} exact={exact}: {found.count(None)} of {len(texts)} identical;",
            end=" ",
        )
        print(
            f"acceptance length {accepted:.2f}; first differences (token, margin):",
            [at for at in found if at],
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
