"""The cases: target, drafter, format, K, and how the requests arrive."""

from dataclasses import dataclass, field
from typing import Any, Literal

from peagle.core import Method
from peagle.export.export import ExportFormat

Architecture = Literal["llama", "qwen2", "qwen3"]
VOCAB = 16  # small enough that random drafts are accepted sometimes
MASK_ID = 15


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    method: Method
    k: int
    to: ExportFormat = "vllm"
    num_layers: int = 1
    architecture: Architecture = "llama"
    sizes: dict[str, Any] = field(default_factory=dict)  # differences from parity_models.SIZES
    draft_vocab: int | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    switches: dict[str, Any] = field(default_factory=dict)
    own_tables: bool = False  # the drafter has its own embeddings and lm_head
    prompts: tuple[int, ...] = (5, 17, 2, 40)  # one length per prompt
    max_tokens: tuple[int, ...] = (30, 20, 40, 24)
    shared_prefix: int = 0  # number of equal tokens at the start of the longer prompts
    engine: dict[str, Any] = field(default_factory=dict)


# Five requests for three slots: prefill overlaps with decoding, and batch rows are reassigned.
QUEUE: dict[str, Any] = {
    "prompts": (9, 3, 30, 21, 14),
    "max_tokens": (16, 37, 20, 25, 30),
    "engine": {"max_num_seqs": 3},
}

# Two KV blocks of the drafter come from an earlier request.
PREFIX: dict[str, Any] = {
    "prompts": (90, 75, 13, 110),
    "max_tokens": (24, 24, 40, 24),
    "shared_prefix": 70,
    "engine": {"max_num_seqs": 2, "block_size": 32},
}

# Prompts are read in chunks of about 30 tokens while another request decodes.
PIECES: dict[str, Any] = {
    "prompts": (90, 40, 110),
    "max_tokens": (24, 40, 24),
    "engine": {"max_num_seqs": 2, "max_num_batched_tokens": 40, "enable_prefix_caching": False},
}

# Prompts and answers are longer than the drafter's sliding window.
WINDOW: dict[str, Any] = {
    "switches": {"sliding_window": 64},
    "prompts": (90, 40, 150),
    "max_tokens": (24, 60, 24),
}

LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0 + i / 8 for i in range(16)],
    "long_factor": [2.0 + i / 2 for i in range(16)],
    "original_max_position_embeddings": 32,  # within the prompts and answers
}
FIVE_TAPS = (0, 2, 4, 5, 7)  # 0 stands for the embeddings

CASES = [
    Case("p-eagle native, pruned", "p-eagle", 3, num_layers=4, draft_vocab=11),
    Case(
        "p-eagle native, full, llama3 rope",
        "p-eagle",
        7,
        num_layers=4,
        sizes={"rope_parameters": LLAMA3_ROPE},
    ),
    Case(
        "p-eagle native, longrope",
        "p-eagle",
        3,
        num_layers=2,
        sizes={"rope_parameters": LONGROPE},
    ),
    Case("p-eagle native, 5 requests for 3 slots", "p-eagle", 1, num_layers=2, **QUEUE),
    Case("p-eagle native, prefix cache", "p-eagle", 7, num_layers=4, draft_vocab=11, **PREFIX),
    Case(
        "p-eagle native, Qwen3, wide heads",
        "p-eagle",
        7,
        num_layers=4,
        architecture="qwen3",
        sizes={"head_dim": 64},
    ),
    Case(
        "p-eagle native, 5 taps, norms, own tables",
        "p-eagle",
        3,
        num_layers=2,
        aux_layer_ids=FIVE_TAPS,
        switches={"norm_before_residual": True, "norm_before_fc": True},
        own_tables=True,
    ),
    Case(
        "p-eagle native, attention bias",
        "p-eagle",
        3,
        num_layers=2,
        switches={"attention_bias": True},
    ),
    Case(
        "p-eagle speculators, served alone",
        "p-eagle",
        3,
        "speculators",
        num_layers=4,
        draft_vocab=11,
    ),
    Case(
        "p-eagle speculators, 5 taps",
        "p-eagle",
        3,
        "speculators",
        num_layers=2,
        aux_layer_ids=FIVE_TAPS,
    ),
    Case("p-eagle native, sliding window", "p-eagle", 3, num_layers=2, **WINDOW),
    Case("p-eagle speculators, sliding window", "p-eagle", 3, "speculators", **WINDOW),
    Case("eagle3 native, sliding window", "eagle3", 3, **WINDOW),
    Case("eagle3 native", "eagle3", 3),
    Case("eagle3 native, 5 requests for 3 slots", "eagle3", 7, draft_vocab=11, **QUEUE),
    Case(
        "eagle3 native, Qwen2, tied, fc_norm, norm_output",
        "eagle3",
        3,
        architecture="qwen2",
        sizes={"tie_word_embeddings": True},
        switches={"fc_norm": True, "norm_output": True},
    ),
    Case(
        "eagle3 speculators, served alone",
        "eagle3",
        3,
        "speculators",
        switches={"norm_before_residual": True},
    ),
]

IN_PIECES = [
    Case("p-eagle native, prompts in pieces", "p-eagle", 3, num_layers=4, draft_vocab=11, **PIECES),
    Case("eagle3 native, prompts in pieces", "eagle3", 3, **PIECES),
]
