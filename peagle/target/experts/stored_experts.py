"""StoredExperts: the experts of a layer in the format of a checkpoint, as a module of the model.

It takes the place of the experts of transformers (Qwen3MoeExperts, GptOssExperts, ..) and computes
the same from fewer bits: the reference for the engine's kernels, which read the matrices as they
are.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from peagle.kernels.expert_matrices import ExpertMatrices, GatedActivation


class StoredExperts(nn.Module):
    def __init__(
        self, gate_up: ExpertMatrices, down: ExpertMatrices, activation: GatedActivation
    ) -> None:
        super().__init__()
        self.activation = activation
        self.tiled_inputs = {"gate_up": gate_up.tiled_inputs, "down": down.tiled_inputs}
        for name, matrices in (("gate_up", gate_up), ("down", down)):
            self.register_buffer(f"{name}_weight", matrices.weight)
            self.register_buffer(f"{name}_scales", matrices.scales)
            self.register_buffer(f"{name}_bias", matrices.bias)

    @property
    def gate_up(self) -> ExpertMatrices:
        return self._matrices("gate_up")

    @property
    def down(self) -> ExpertMatrices:
        return self._matrices("down")

    def _matrices(self, name: str) -> ExpertMatrices:
        weight, scales, bias = (getattr(self, f"{name}_{x}") for x in ("weight", "scales", "bias"))
        return ExpertMatrices(weight, scales, bias, self.tiled_inputs[name])

    @property
    def weight_count(self) -> int:
        """The number of weights in the matrices of all experts."""
        return sum(x.num_experts * x.outputs * x.inputs for x in (self.gate_up, self.down))

    @property
    def nbytes(self) -> int:
        return sum(x.num_experts * x.expert_bytes for x in (self.gate_up, self.down))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """hidden [T, d], chosen [T, top_k] experts with their weights -> [T, d]"""
        total = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            rows, ranks = (chosen == expert).nonzero(as_tuple=True)
            gate_up = self._multiply(self.gate_up, expert, hidden[rows])
            out = self._multiply(self.down, expert, self.activation(gate_up))
            total.index_add_(0, rows, out * weights[rows, ranks, None].to(out.dtype))
        return total

    def _multiply(self, matrices: ExpertMatrices, expert: int, x: Tensor) -> Tensor:
        bias = None if matrices.bias is None else matrices.bias[expert].to(x.dtype)
        return linear(x, matrices.dense(expert, x.dtype), bias)
