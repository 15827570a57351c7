"""How the matrices of a drafter are stored: rows of 8 bits, or of 4 bits with some of 8."""

from dataclasses import dataclass

from torch import Tensor

from peagle.errors import UserError

GROUPS = (16, 32, 64, 128)
# fc costs the most acceptance in 4 bits (docs/training.md). Trained embeddings and output rows are
# not measured in 4 bits.
EIGHT_BIT = ("fc", "embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class RowFormat:
    bits: int = 8
    group: int = 32  # inputs with one scale, in 4 bits
    eight_bit: tuple[str, ...] = EIGHT_BIT  # first parts of the names of matrices kept at 8 bits

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise UserError(f"`bits` is {self.bits}: rows have 4 or 8 bits")
        if self.group not in GROUPS:
            raise UserError(f"`group` is {self.group}: it must be one of {GROUPS}")

    def is_four_bit(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor is stored in 4 bits; rows of incomplete groups keep 8."""
        return (
            self.bits == 4
            and tensor.is_floating_point()
            and tensor.ndim == 2
            and tensor.shape[1] % self.group == 0
            and not any(name == part or name.startswith(part + ".") for part in self.eight_bit)
        )

    @property
    def weights(self) -> str:
        """The value of "weights" in config.json."""
        return f"int{self.bits}"


INT8 = RowFormat(8)
INT4 = RowFormat(4)
