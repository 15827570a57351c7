"""The pairs of the fuzzer: tiny, in memory, and built once per process."""

from functools import cache
from typing import Any

import torch

from peagle.core import Method
from peagle.drafter import Drafter
from peagle.loaded import LoadedPair
from tests.support.engine.engines import pair_of, small_with_words
from tests.support.grammars import letters, small_with_letters
from tests.support.models.tiny_models import make_drafter, make_target

# Tokens of the longest answer with its prompt; "exact": in bfloat16 and exact mode.
CONTEXTS = {
    "llama": 256,
    "llama words": 256,
    "qwen3-moe": 256,
    "gpt-oss": 256,
    "gpt2": 64,
    "exact": 256,
}

LAYERS = 3
AUX = (0, 1, 2)
DRAFTERS: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"draft_vocab": 64, "dependency": 8},
    "gpt2": {
        "inject": True,
        "bidirectional": True,
        "convolution": True,
        "refinement": 2,
        "confidence": True,
    },
}


def supports_grammars(target: str) -> bool:
    """Whether grammars can be used, which a word-level tokenizer does not allow."""
    return target != "llama words"


@cache
def fuzz_pair(name: str) -> LoadedPair:
    """The pair of a target; drafters of "llama" are trained, the others are random."""
    if name == "llama":
        return small_with_letters()
    if name == "llama words":
        return small_with_words()
    target = make_target("llama" if name == "exact" else name, num_hidden_layers=LAYERS)
    target.tokenizer = letters()
    if name == "exact":
        target.model.to(torch.bfloat16)
    switches = DRAFTERS.get(name, {})
    drafters: dict[Method, Drafter] = {
        "p-eagle": make_drafter(target, "p-eagle", 1, aux=AUX, **switches),
        "eagle3": make_drafter(target, "eagle3", 1, aux=AUX),
    }
    return pair_of(target, drafters)
