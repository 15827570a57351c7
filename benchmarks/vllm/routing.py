"""Equal routing in vLLM: random weights as `peagle bench-step` has them, and a count of experts.

vLLM's own dummy weights lie in +-0.001: all rows of a pass choose nearly the same experts, and
layers of one shape have the same weights. The patches hold only if the engine runs in this process
(VLLM_ENABLE_V1_MULTIPROCESSING=0).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

WEIGHT_STD = 0.02  # as in transformers


def patch_dummy_weights() -> None:
    """Fill the weights of every model that vLLM loads with load_format="dummy" from now on."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def load_weights(loader: Any, model: torch.nn.Module, model_config: Any) -> None:
        generators: dict[torch.device, torch.Generator] = {}
        for name, tensor in model.state_dict().items():
            if tensor.device not in generators:
                generators[tensor.device] = torch.Generator(tensor.device).manual_seed(0)
            fill_weight(name, tensor, generators[tensor.device])

    DummyModelLoader.load_weights = load_weights


@torch.no_grad()
def fill_weight(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Initialize a weight as transformers does: norms are 1, biases 0 (that of a router random).

    Not with `uniform_`: in bf16 its mean is not quite 0, so that all rows of a pass get a common
    part, grow alike and choose the same experts.
    """
    if not tensor.is_floating_point() or "scale" in name:
        return
    if "norm" in name:
        tensor.fill_(1.0)
    elif name.endswith("bias") and "router" not in name:
        tensor.zero_()
    else:
        tensor.normal_(0.0, WEIGHT_STD, generator=generator)


class ExpertCounter:
    """The experts touched per layer and pass, in passes of a given number of rows.

    CUDA graphs run no Python code: while `counting`, passes run without them.
    """

    def __init__(self) -> None:
        self.rows = 0  # 0: not counting
        self.touched: list[int] = []

    def install(self) -> None:
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import BatchDescriptor
        from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter
        from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

        select_experts = FusedMoERouter.select_experts
        dispatch = CudagraphDispatcher.dispatch

        def counted(router: Any, *args: Any, **kwargs: Any) -> Any:
            weights, ids = select_experts(router, *args, **kwargs)
            if self.rows and len(ids) == self.rows:
                self.touched.append(len(ids.unique()))
            return weights, ids

        def uncaptured(dispatcher: Any, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
            if self.rows:
                return CUDAGraphMode.NONE, BatchDescriptor(num_tokens)
            return dispatch(dispatcher, num_tokens, *args, **kwargs)

        FusedMoERouter.select_experts = counted
        CudagraphDispatcher.dispatch = uncaptured

    @contextmanager
    def counting(self, rows: int) -> Iterator[None]:
        self.touched.clear()
        self.rows = rows
        try:
            yield
        finally:
            self.rows = 0

    @property
    def mean(self) -> float | None:
        """None if no pass was counted: a dense target, or an engine in another process."""
        return sum(self.touched) / len(self.touched) if self.touched else None
