"""CpuExperts: the experts of a mixture, packed for the C kernels of a CPU."""

import torch

from peagle.engine.model.weight import PackedCopy, shared_copy
from peagle.kernels.cpu.experts import PackedExperts, can_pack_experts, has_codes
from peagle.kernels.expert_matrices import ExpertMatrices, GatedActivation


class CpuExperts:
    """Engines on the same experts share the packed copy; modules keep their own tensors."""

    def __init__(
        self,
        gate_up: ExpertMatrices,
        down: ExpertMatrices,
        activation: GatedActivation,
        dtype: torch.dtype,
    ) -> None:
        """`dtype`: of the rows."""
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self.dtype = dtype
        self.packed: PackedExperts | None = None  # if the kernels support the experts here
        self._copy: PackedCopy[PackedExperts] | None = None  # owns `packed`
        self._float_copy: PackedCopy[PackedExperts] | None = None
        if can_pack_experts(gate_up, down, dtype):
            self._use_copy(int8_rows=False)

    def quantize(self) -> None:
        """Multiply in int8 from now on, where the kernels support that."""
        if not can_pack_experts(self.gate_up, self.down, self.dtype, int8_rows=True):
            return
        if has_codes(self.gate_up) and has_codes(self.down):
            self._float_copy = self._copy  # The same codes: another engine may use it.
        self._use_copy(int8_rows=True)

    def _use_copy(self, int8_rows: bool) -> None:
        def pack() -> PackedExperts:
            if int8_rows and self._float_copy is not None:
                return self._float_copy.packed.with_int8_rows()
            return PackedExperts(self.gate_up, self.down, self.activation, int8_rows)

        tensors = [x for m in (self.gate_up, self.down) for x in (m.weight, m.scales, m.bias)]
        layout = f"experts {self.activation}{' in int8' if int8_rows else ''}"
        self._copy = shared_copy(layout, tensors, pack)
        self.packed = self._copy.packed
