"""How many answers does speculation leave identical, with and without exact mode? (docs/lossless.md has the results)

PYTHONPATH=. python tests/measure_flips.py cpu bfloat16 20 96
"""

import sys
from pathlib import Path

import torch

THREADS = torch.get_num_threads()  # the tests' conftest takes one

from peagle.core import Sampling  # noqa: E402
from peagle.decode import decode  # noqa: E402
from peagle.errors import UserError  # noqa: E402
from peagle.exact import set_exact  # noqa: E402
from peagle.loaded import LoadedPair, load  # noqa: E402
from tests.test_decode import Oracle, plain, tokens_of  # noqa: E402

THREE_IN_FOUR = [True, True, True, False]


def first_difference(pair: LoadedPair, text: str, count: int) -> tuple[int, float] | None:
    """(token, top-2 logit margin there) where the drafted answer leaves the plain one; None: it does not."""
    target, ids = pair.target, pair.encode(text)
    expected = plain(target, ids, count)

    class Drafts(Oracle):
        def propose(self, verified, k):
            return super().propose(verified, k).to(target.device)

    found = tokens_of(list(decode(target, Drafts(ids, expected, THREE_IN_FOUR), ids, 7, count, Sampling())))
    if found == expected:
        return None
    at = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    prefix = torch.tensor(ids + expected[:at], device=target.device)
    best = target.forward(prefix, keep=1).logits[0].float().topk(2).values
    return at, round(float(best[0] - best[1]), 4)


def main(device: str, dtype: str, prompts: int, count: int) -> None:
    torch.set_num_threads(THREADS)
    pair = load(device=device, dtype=dtype)
    texts = (Path(__file__).parent / "prompts.txt").read_text().splitlines()[:prompts]
    for exact in (False, True):
        try:
            set_exact(pair.target, exact)
        except UserError as error:
            print(error)
            continue
        found = [first_difference(pair, text, count) for text in texts]
        print(f"{device} {dtype} exact={exact}: {found.count(None)} of {len(texts)} identical;", end=" ")
        print("first differences (token, margin):", [at for at in found if at], flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
