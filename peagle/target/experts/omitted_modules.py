"""A class of models that lack some modules, which another part of the program provides."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def omit_modules(model_class: type[PreTrainedModel], names: Iterable[str]) -> type[PreTrainedModel]:
    """A model of this class allocates no memory for the modules, and does not miss their tensors.

    Name and Python module are those of `model_class`: transformers looks both up.
    """
    names = list(names)
    if not names:
        return model_class

    def initialize(self: Any, config: Any, *args: Any, **options: Any) -> None:
        model_class.__init__(self, config, *args, **options)
        for name in names:
            self.set_submodule(name, nn.Identity())

    members = {"__init__": initialize, "__module__": model_class.__module__}
    return type(model_class.__name__, (model_class,), members)
