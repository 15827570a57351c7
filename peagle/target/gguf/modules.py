"""StoredLinear and StoredEmbedding: layers whose weight stays in the format of its file.

The weight is widened to the dtype of the activations in every call. That is slow and takes little
memory: it is the reference for the engine, which packs the weights for its kernels.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from peagle.kernels.stored_matrix import Table, dense, table_bytes, table_rows
from peagle.target.experts.stored_experts import StoredExperts

MAX_OUTPUTS = 8192  # that are widened at once


class StoredLinear(nn.Module):
    weight: Table  # [outputs, inputs]; not a parameter: its dtype is not the model's
    bias: Tensor | None

    def __init__(self, weight: Table, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """Of a large matrix (lm_head), some outputs at a time are widened."""
        if len(self.weight) <= MAX_OUTPUTS:
            return linear(x, dense(self.weight, x.dtype), self.bias)
        ids = torch.arange(len(self.weight), device=x.device).split(MAX_OUTPUTS)
        parts = [linear(x, table_rows(self.weight, part, x.dtype)) for part in ids]
        out = torch.cat(parts, -1)
        return out if self.bias is None else out + self.bias


class StoredEmbedding(nn.Module):
    weight: Table  # [vocabulary, d]

    def __init__(self, weight: Table, dtype: torch.dtype) -> None:
        """`dtype`: of the activations."""
        super().__init__()
        self.weight = weight
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        return table_rows(self.weight, ids, self.dtype)


def weight_bytes(module: nn.Module) -> int:
    """The memory of a module's parameters and of its weights as stored, shared ones once."""
    stored = [x for x in module.modules() if isinstance(x, (StoredLinear, StoredEmbedding))]
    tables = {id(x.weight): x.weight for x in stored}
    experts = sum(x.nbytes for x in module.modules() if isinstance(x, StoredExperts))
    return experts + sum(table_bytes(x) for x in (*module.parameters(), *tables.values()))
