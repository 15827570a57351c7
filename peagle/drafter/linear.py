"""Linear: a linear layer whose weight may be narrower than its rows."""

from torch import Tensor, nn
from torch.nn.functional import linear


class Linear(nn.Linear):
    """With a bf16 weight and float32 rows, the weight is widened in every call.

    A drafter of a target with weights as stored has such layers: they take half the memory.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype == x.dtype:
            return super().forward(x)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return linear(x, self.weight.to(x.dtype), bias)
