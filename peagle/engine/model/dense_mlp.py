"""DenseMLP: the gated MLP of a layer."""

from dataclasses import dataclass

from torch import Tensor

from peagle.engine.model.weight import Weight


@dataclass(frozen=True, slots=True)
class DenseMLP:
    gate_up: Weight
    down: Weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, d] -> [T, d], or its split-K partial sums [S, T, d]."""
        return self.down.split_k(self.gate_up.gated(x))

    def quantize(self) -> None:
        """Multiply in int8 from now on."""
        for weight in self.weights:
            weight.quantize()

    @property
    def weights(self) -> list[Weight]:
        return [self.gate_up, self.down]
