"""ExpertShapes: the experts of a target's layers, as its config describes them.

A pass reads the experts that its rows choose. If rows choose independently, T rows with k of E
experts each touch E (1 - (1 - k / E)^T): 8 rows of Qwen3-30B-A3B touch 52 of 128, with 1.2 rows
each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peagle.kernels.expert_matrices import MXFP4_BLOCK

Shape = tuple[int, int]  # outputs, inputs


@dataclass(frozen=True, slots=True)
class ExpertShapes:
    hidden_size: int
    intermediate_size: int  # of an expert
    num_experts: int  # of a layer
    experts_per_row: int
    num_layers: int
    is_mxfp4: bool = False

    @property
    def expert(self) -> tuple[Shape, ...]:
        """The matrices of an expert: gate and up side by side, and down."""
        return (
            (2 * self.intermediate_size, self.hidden_size),
            (self.hidden_size, self.intermediate_size),
        )

    @property
    def weights(self) -> int:
        """The number of weights of all experts of all layers."""
        expert = sum(n * k for n, k in self.expert)
        return self.num_layers * self.num_experts * expert

    @property
    def name(self) -> str:
        """`8 of 128 experts with 768`"""
        format_name = " in MXFP4" if self.is_mxfp4 else ""
        experts = f"{self.experts_per_row} of {self.num_experts} experts"
        return f"{experts} with {self.intermediate_size}{format_name}"

    def share_read(self, rows: int) -> float:
        """The share of the experts that a pass of `rows` rows touches, on average."""
        return 1 - (1 - self.experts_per_row / self.num_experts) ** rows

    def matrix_rows(self, rows: int) -> int:
        """The rows of a touched expert in a pass of `rows` rows, on average."""
        touched = self.num_experts * self.share_read(rows)
        return max(1, round(rows * self.experts_per_row / touched))

    def sample(self, weights: float) -> list[Shape]:
        """Matrices with about `weights` weights in all.

        Whole experts; where one is larger, part of its outputs.
        """
        total = self.num_layers * self.num_experts
        count = min(total, weights / (self.weights / total))
        cut = min(1.0, count)
        expert = [(max(1, round(cut * n)), k) for n, k in self.expert]
        return expert * max(1, round(count))


def config_experts(config: Mapping[str, Any]) -> ExpertShapes | None:
    """The experts that a config of transformers describes; None for a dense target.

    All layers count as mixtures.
    """
    count = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    if count < 2:
        return None
    per_row = int(config.get("num_experts_per_tok") or config["experts_per_token"])
    quantization = config.get("quantization_config") or {}
    experts = ExpertShapes(
        int(config["hidden_size"]),
        int(config.get("moe_intermediate_size") or config["intermediate_size"]),
        count,
        per_row,
        int(config["num_hidden_layers"]),
        quantization.get("quant_method") == "mxfp4",
    )
    if experts.intermediate_size < 1 or not 1 <= per_row <= count:
        raise ValueError(f"experts must have positive sizes: {experts}")
    if experts.is_mxfp4 and any(k % MXFP4_BLOCK for _, k in experts.expert):
        raise ValueError(f"{MXFP4_BLOCK} inputs of MXFP4 share a scale: {experts}")
    return experts
