"""ExpertLayer: the router and the experts of a layer, in the model and in the files of a target.

Files have a matrix for each expert and projection, as vLLM reads them. A model of transformers has
two tensors for all experts of a layer, and newer files may have them too:

    Qwen3-MoE   model.layers.0.mlp.experts.3.gate_proj.weight        [I, d], up_proj [I, d]
                model.layers.0.mlp.experts.3.down_proj.weight        [d, I]
    Mixtral     model.layers.0.block_sparse_moe.experts.3.w1.weight  gate; w3 is up, w2 is down
    model       model.layers.0.mlp.experts.gate_up_proj              [E, 2I, d], gates first
                model.layers.0.mlp.experts.down_proj                 [E, d, I]
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from peagle.target.quantized.layout import WEIGHT


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names in files; `block` holds the router `gate` and the experts."""

    block: str
    gate: str
    up: str
    down: str


EXPERT_NAMES = {  # by the model_type of the config
    "qwen3_moe": ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
}


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    block: str  # The module with router and experts, such as model.layers.0.mlp
    names: ExpertNames
    num_experts: int
    hidden_size: int
    intermediate_size: int

    @property
    def module(self) -> str:
        """The experts in the model."""
        return f"{self.block}.experts"

    @property
    def block_in_files(self) -> str:
        return f"{self.block.rpartition('.')[0]}.{self.names.block}"

    @property
    def router(self) -> str:
        """In files."""
        return f"{self.block_in_files}.gate"

    def gate_and_up(self, expert: int) -> tuple[str, str]:
        prefix = f"{self.block_in_files}.experts.{expert}"
        return f"{prefix}.{self.names.gate}", f"{prefix}.{self.names.up}"

    def down(self, expert: int) -> str:
        return f"{self.block_in_files}.experts.{expert}.{self.names.down}"

    @property
    def matrices(self) -> dict[str, int]:
        """The matrices of all experts in files, with their numbers of inputs."""
        inputs: dict[str, int] = {}
        for expert in range(self.num_experts):
            inputs |= dict.fromkeys(self.gate_and_up(expert), self.hidden_size)
            inputs[self.down(expert)] = self.intermediate_size
        return inputs

    def tensors_in_files(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A tensor of the block, named as in the model, by its names in files."""
        if name == f"{self.module}.gate_up_proj":
            for expert, gate_up in enumerate(tensor):
                for part, matrix in zip(self.gate_and_up(expert), gate_up.chunk(2), strict=True):
                    yield part + WEIGHT, matrix
        elif name == f"{self.module}.down_proj":
            for expert, matrix in enumerate(tensor):
                yield self.down(expert) + WEIGHT, matrix
        else:
            yield self.block_in_files + name.removeprefix(self.block), tensor


def find_expert_layers(model: Any) -> list[ExpertLayer]:
    """The layers with experts of a supported type; none for other targets."""
    config = model.config.get_text_config()
    names = EXPERT_NAMES.get(config.model_type)
    if names is None or config.hidden_act != "silu":
        return []
    modules = {
        name.removesuffix(".experts"): module
        for name, module in model.named_modules()
        if name.endswith(".experts") and has_merged_experts(module)
    }
    return [ExpertLayer(block, names, *module.down_proj.shape) for block, module in modules.items()]


def has_merged_experts(module: nn.Module) -> bool:
    parameters = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    return all(isinstance(x, nn.Parameter) and x.ndim == 3 for x in parameters)
