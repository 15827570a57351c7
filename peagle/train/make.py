"""The recipe of `peagle make-drafter`: settings that fit the target and the hardware."""

from dataclasses import dataclass
from pathlib import Path

import torch

from peagle.core import Method
from peagle.target import Target
from peagle.train.config import TrainConfig

MAX_FULL_VOCABULARY = 32768  # tokens; only larger vocabularies are pruned
REFERENCE_HIDDEN_SIZE = 576
PACK_TOKENS_PER_GB = 256  # for a target of the reference hidden size
MIN_PACK_TOKENS = 1024
MAX_PACK_TOKENS = 16384
# Positions that a row of the drafter attends to. Without it, acceptance falls behind the lengths of
# the training documents (docs/training.md, Long contexts).
SLIDING_WINDOW = 1024
DEPENDENCY_RANK = 64  # +9.5 % acceptance length under equal training (docs/science.md)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings that `make-drafter` chooses."""

    max_tokens: int  # of an answer
    config: TrainConfig


def choose_recipe(
    target: Target, name: str, method: Method, out: Path, epochs: float, cuda_bytes: int | None
) -> Recipe:
    """`cuda_bytes` is the free memory of the GPU; None, for no GPU, gives smaller settings."""
    pruned = target.vocab_size > MAX_FULL_VOCABULARY
    tokens = choose_pack_tokens(target, cuda_bytes)
    config = TrainConfig(
        target=name,
        data=str(out / "answers"),
        out=str(out / method),
        method=method,
        k=10 if method == "p-eagle" else 7,
        dependency=DEPENDENCY_RANK if method == "p-eagle" else 0,
        draft_vocab=MAX_FULL_VOCABULARY // 2 if pruned else 0,
        sliding_window=SLIDING_WINDOW,
        max_length=min(2048, target.context, tokens),
        pack_tokens=tokens,
        max_anchors=tokens // 2,
        held_out=200 if cuda_bytes else 10,
        epochs=epochs,
        log_every=20 if cuda_bytes else 5,
        save_every=1000 if cuda_bytes else 50,
        eval_every=1000 if cuda_bytes else 0,
    )
    return Recipe(512 if cuda_bytes else 128, config)


def choose_pack_tokens(target: Target, cuda_bytes: int | None) -> int:
    """A power of 2 that grows with the memory and falls with the target's hidden size."""
    if cuda_bytes is None:
        return MIN_PACK_TOKENS
    gigabytes = cuda_bytes / 1e9
    limit = PACK_TOKENS_PER_GB * gigabytes * REFERENCE_HIDDEN_SIZE / target.hidden_size
    size = MIN_PACK_TOKENS
    while size < MAX_PACK_TOKENS and 2 * size <= limit:
        size *= 2
    return size


def free_cuda_bytes(target: Target) -> int | None:
    """The free memory of the target's GPU; None if it is not on a GPU."""
    return torch.cuda.mem_get_info(target.device)[0] if target.device.type == "cuda" else None
