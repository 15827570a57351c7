"""All stages for one target, with settings that fit the hardware found."""

from dataclasses import dataclass
from pathlib import Path

import torch

from peagle.core import Method
from peagle.target import Target
from peagle.train.config import TrainConfig

FULL_VOCABULARY = 32768  # a smaller one is not pruned
TOKENS_PER_GB = 256  # of a pack, for a target 576 wide


@dataclass(frozen=True, slots=True)
class Recipe:
    """What `make-drafter` chooses: how long answers are, and the training config."""

    max_tokens: int
    config: TrainConfig


def recipe(
    target: Target, name: str, method: Method, out: Path, epochs: float, cuda_bytes: int | None
) -> Recipe:
    """`cuda_bytes`: free memory of the GPU; None: there is none, and less is asked for."""
    vocabulary = 0 if target.vocab_size <= FULL_VOCABULARY else FULL_VOCABULARY // 2
    tokens = pack_tokens(target, cuda_bytes)
    config = TrainConfig(
        target=name,
        data=str(out / "answers"),
        out=str(out / method),
        method=method,
        k=10 if method == "p-eagle" else 7,
        draft_vocab=vocabulary,
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


def pack_tokens(target: Target, cuda_bytes: int | None) -> int:
    """A power of 2 from 1,024 to 16,384: the more memory and the narrower the target, the larger."""
    if cuda_bytes is None:
        return 1024
    most = TOKENS_PER_GB * cuda_bytes / 1e9 * 576 / target.hidden_size
    size = 1024
    while size < 16384 and 2 * size <= most:
        size *= 2
    return size


def free_cuda_bytes(target: Target) -> int | None:
    return torch.cuda.mem_get_info(target.device)[0] if target.device.type == "cuda" else None
