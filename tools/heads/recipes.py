"""How the heads of each pair are trained, the rungs that are compared, and the sizes that result.

python -m tools.heads.recipes    # bytes of every head of these recipes, in 4 and in 8 bits
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from peagle.core import Method
from peagle.drafter import Drafter
from peagle.drafter.config import DrafterConfig
from peagle.drafter.formats import int4, int8
from peagle.drafter.formats.row_format import INT4, INT8, RowFormat
from peagle.train.config import TrainConfig

SHIPPED = Path(__file__).resolve().parents[2] / "peagle" / "drafters"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Keys of `peagle train` for the heads of one pair."""

    settings: dict[str, Any]  # of all heads
    methods: dict[Method, dict[str, Any]]
    target: dict[str, Any]  # sizes of the target, as keys of DrafterConfig
    shipped: Path  # folder of the heads that training continues, if they exist
    max_rounding_loss: float = 0.01  # acceptance length that 4 or 8 bits may cost

    def config(self, method: Method) -> DrafterConfig:
        """The shape of a head, without its target."""
        keys = self.settings | self.methods[method]
        sizes = dict(self.target)
        sizes["intermediate_size"] = keys.get("intermediate_size", sizes["intermediate_size"])
        parallel = method == "p-eagle"
        return DrafterConfig(
            **sizes,
            method=method,
            num_layers=keys["layers"],
            draft_vocab_size=keys["draft_vocab"],
            aux_layer_ids=keys["aux_layer_ids"],
            target_hidden_size=sizes["hidden_size"],
            num_taps=len(keys["aux_layer_ids"]),
            mask_token_id=keys["mask_token_id"] if parallel else None,
            dependency=keys.get("dependency", 0),
            sliding_window=keys.get("sliding_window"),
        )


COMMON: dict[str, Any] = {
    "pack_tokens": 16384,
    "max_anchors": 6144,
    "keep": 0.75,
    "joined": 0.2,
    "held_out": 200,
    "loss": "lk",
    "mix": 0.95,
    "lr": 1.5e-3,
    "warmup": 0.02,
    "final_lr": 0.0,
    "epochs": 8.0,
    "log_every": 50,
    "save_every": 1500,
    "eval_every": 0,
}
RECIPES = {
    "smollm2-135m": Recipe(
        COMMON
        | {
            "target": "smollm2-135m",
            "aux_layer_ids": (2, 15, 27),
            "mask_token_id": 16,
            "draft_vocab": 24576,
            "bits": 4,
            "rounded": 0.6,
            "sliding_window": 1024,
        },
        {
            "p-eagle": {"k": 11, "dependency": 64, "layers": 4},
            "eagle3": {"k": 7, "layers": 1},
        },
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_heads": 9,
            "num_kv_heads": 3,
            "head_dim": 64,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
        },
        SHIPPED / "smollm2-135m",
    ),
    # With this learning rate, training starts from the target's blocks (`--set init=target`); to
    # continue the shipped P-EAGLE head, use a lower one. The heads must fit beside those of SmolLM2
    # in 28 MB: 4 bits and a narrower MLP.
    "qwen2.5-coder-0.5b": Recipe(
        COMMON
        | {
            "target": "qwen2.5-coder-0.5b",
            "aux_layer_ids": (2, 12, 21),
            "mask_token_id": 151665,
            "draft_vocab": 32768,
            "lr": 3e-3,
            "bits": 4,
            "rounded": 0.4,
            "sliding_window": 1024,
        },
        {
            "p-eagle": {"k": 11, "dependency": 64, "layers": 4, "intermediate_size": 512},
            "eagle3": {"k": 7, "layers": 1, "intermediate_size": 768},
        },
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_heads": 14,
            "num_kv_heads": 2,
            "head_dim": 64,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
        },
        SHIPPED / "qwen2.5-coder-0.5b",
        max_rounding_loss=0.05,
    ),
}
DEFAULT_PAIR = "smollm2-135m"

# Changes of the P-EAGLE recipe, or of that of another method, compared under equal training.
RUNGS: dict[str, dict[str, Any]] = {
    "base": {},
    "on-policy": {"on_policy": 0.8},
    "tree": {"loss": "tree", "mix": 0.8},
    "convolution": {"convolution": True},
    "refine": {"refinement": 1},
    "refine2": {"refinement": 2},
    "length": {"loss": "length", "mix": 0.8},
    "dpace": {"loss": "dpace", "mix": 0.5},
    "tvmix": {"loss": "tvmix", "mix": 0.95},
    "depth-weight": {"depth_weight": 0.8},
    "all": {"on_policy": 0.8, "convolution": True, "depth_weight": 0.8},
    # Why EAGLE-3 falls behind on Qwen2.5-Coder-0.5B, which has 24 layers.
    "eagle3": {"method": "eagle3"},
    "eagle3-norms": {"method": "eagle3", "fc_norm": True},
    "eagle3-late-tap": {"method": "eagle3", "aux_layer_ids": (2, 12, 23)},
    "eagle3-two-layers": {"method": "eagle3", "layers": 2, "intermediate_size": 256},
}


def stored_format(config: TrainConfig) -> RowFormat:
    """The rows of a head while it is not published."""
    return INT4 if config.bits == 4 else INT8


def stored_bytes(config: DrafterConfig, rows: RowFormat) -> int:
    """The size of model.safetensors of a head with frozen embeddings."""
    tensors = dict(Drafter(config).state_dict())
    if config.pruned:
        tensors["target_ids"] = torch.arange(config.draft_vocab_size, dtype=torch.int32)
    if rows.bits == 4:
        tensors = int4.pack(tensors, config.vocab_size, rows)
    else:
        tensors = int8.pack(tensors, config.vocab_size)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not name.endswith(int8.SCALE):
            tensors[name] = tensor.to(torch.bfloat16)
    return len(save(tensors))


def main() -> None:
    print("| pair | head | MLP | draft vocabulary | 8 bits, MB | 4 bits, MB |")
    print("|---|---|--:|--:|--:|--:|")
    for pair, recipe in RECIPES.items():
        for method in recipe.methods:
            config = recipe.config(method)
            sizes = [f"{stored_bytes(config, rows) / 1e6:.2f}" for rows in (INT8, INT4)]
            print(
                f"| {pair} | {method} | {config.intermediate_size:,} |"
                f" {config.draft_vocab_size:,} | {' | '.join(sizes)} |"
            )


if __name__ == "__main__":
    main()
