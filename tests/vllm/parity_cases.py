"""The cases: which target, which drafter, which format, which K, and how the requests come in."""

from dataclasses import dataclass, field
from typing import Any, Literal

from peagle.core import Method
from peagle.drafter.export import ExportFormat

Architecture = Literal["llama", "qwen2", "qwen3"]
VOCAB, MASK_ID = 16, 15  # so small that a random draft is right now and then


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    method: Method
    k: int
    to: ExportFormat = "vllm"
    architecture: Architecture = "llama"
    num_layers: int = 1
    draft_vocab: int | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    switches: dict[str, bool] = field(default_factory=dict)
    own_tables: bool = False  # embeddings and lm_head of the drafter's own, not the target's
    prompts: tuple[int, ...] = (5, 17, 2, 40)  # a length each
    max_tokens: tuple[int, ...] = (30, 20, 40, 24)
    shared_prefix: int = 0  # the first tokens that all prompts longer than this have in common
    engine: dict[str, Any] = field(default_factory=dict)


# A queue: five requests for three places, so that prompts are read while others decode and rows change owner.
QUEUE: dict[str, Any] = {"prompts": (9, 3, 30, 21, 14), "max_tokens": (16, 37, 20, 25, 30), "engine": {"max_num_seqs": 3}}

# Prompts read in pieces of 24 tokens, and blocks of 32 positions taken from the prefix cache: the drafter's context
# then comes from several passes, and from an earlier request.
CHUNKS: dict[str, Any] = {
    "prompts": (90, 75, 13, 110),
    "max_tokens": (24, 24, 40, 24),
    "shared_prefix": 70,
    "engine": {"max_num_seqs": 2, "block_size": 32, "max_num_batched_tokens": 24},
}

CASES = [
    Case("p-eagle native, pruned", "p-eagle", 3, num_layers=4, draft_vocab=11),
    Case("p-eagle native, full vocabulary", "p-eagle", 7, num_layers=4),
    Case("p-eagle native, queue, K=1", "p-eagle", 1, num_layers=2, **QUEUE),
    Case("p-eagle speculators, served alone", "p-eagle", 3, "speculators", num_layers=4, draft_vocab=11),
    Case("eagle3 native", "eagle3", 3),
    Case("eagle3 native, queue, K=7", "eagle3", 7, draft_vocab=11, **QUEUE),
    Case("eagle3 speculators, served alone", "eagle3", 3, "speculators", switches={"norm_before_residual": True}),
    Case(
        "p-eagle native, 5 taps, norms, own tables",
        "p-eagle",
        3,
        num_layers=2,
        aux_layer_ids=(1, 2, 4, 5, 7),
        switches={"norm_before_residual": True, "norm_before_fc": True},
        own_tables=True,
    ),
    Case("p-eagle native, chunks, prefix cache", "p-eagle", 7, num_layers=4, draft_vocab=11, **CHUNKS),
    Case("p-eagle native, Qwen3 target", "p-eagle", 7, architecture="qwen3", num_layers=4),
    Case(
        "eagle3 native, Qwen2 target, fc_norm, norm_output",
        "eagle3",
        3,
        architecture="qwen2",
        switches={"fc_norm": True, "norm_output": True},
    ),
]
