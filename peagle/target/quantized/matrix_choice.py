"""MatrixChoice: the matrices of a target that `peagle quantize` rounds, by their names in files."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from peagle.errors import UserError
from peagle.target.quantized.expert_layer import EXPERT_NAMES, ExpertLayer, find_expert_layers


@dataclass(frozen=True, slots=True)
class MatrixChoice:
    inputs: dict[str, int]  # matrix -> its number of inputs
    ignored: list[str]  # linear layers and routers that stay as they are
    expert_layers: list[ExpertLayer]

    def tensors_in_files(self, stored: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a file, with one matrix for each expert and projection."""
        for name, tensor in stored.items():
            layers = [x for x in self.expert_layers if name.startswith(f"{x.block}.")]
            if layers:
                yield from layers[0].tensors_in_files(name, tensor)
            else:
                yield name, tensor

    @property
    def expert_matrices(self) -> int:
        return sum(len(layer.matrices) for layer in self.expert_layers)


def choose_matrices(model: Any) -> MatrixChoice:
    """The matrices of the decoder's linear layers and of its experts."""
    head = model.get_output_embeddings()
    names = {
        module: name for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    layers = find_expert_layers(model)
    require_known_matrices(model, set(names), layers)
    in_decoder = set(model.get_decoder().modules())
    inputs = {
        name: module.in_features
        for module, name in names.items()
        if module in in_decoder and module is not head
    }
    ignored = [name for name in names.values() if name not in inputs]
    for layer in layers:
        inputs |= layer.matrices
        ignored.append(layer.router)
    return MatrixChoice(inputs, ignored, layers)


def require_known_matrices(model: Any, linear: set[nn.Linear], layers: list[ExpertLayer]) -> None:
    modules: list[Any] = [*linear, model.get_input_embeddings()]
    for layer in layers:
        modules += [model.get_submodule(layer.block).gate, model.get_submodule(layer.module)]
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and id(parameter) not in known:
            if model.config.get_text_config().model_type == "gpt_oss":
                raise UserError(
                    "the experts of gpt_oss targets, with biases and interleaved gates, are"
                    " supported in mxfp4 only: use mxfp4"
                )
            raise UserError(
                f"{name} is not the matrix of a linear layer, nor of experts of a"
                f" {' or '.join(EXPERT_NAMES)} target: such targets cannot be quantized"
            )
