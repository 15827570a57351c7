"""ResidualTaps: the residual streams entering some decoder layers, captured by hooks."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class CapturedStreams(threading.local):
    """The streams of the pass that a thread runs, by layer: passes of threads do not mix."""

    def __init__(self) -> None:
        self.by_layer: dict[int, Tensor] = {}


class ResidualTaps:
    def __init__(self, layers: Sequence[nn.Module] | nn.ModuleList, ids: Iterable[int]) -> None:
        """Hook the layers with these ids."""
        self.ids = tuple(ids)
        self._captured = CapturedStreams()
        self.handles: list[RemovableHandle] = [
            layers[i].register_forward_pre_hook(self._capture_hook(i), with_kwargs=True)
            for i in set(self.ids)
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self.handles:
            handle.remove()

    def take(self) -> list[Tensor]:
        """The streams [batch, rows, d] of this thread's last pass, in the order of `ids`."""
        streams = [self._captured.by_layer[i] for i in self.ids]
        self.clear()
        return streams

    def clear(self) -> None:
        """Forget the streams of this thread's last pass."""
        self._captured.by_layer.clear()

    def _capture_hook(self, layer: int) -> Any:
        captured = self._captured

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            captured.by_layer[layer] = args[0] if args else kwargs["hidden_states"]

        return hook
