"""One process or many: `torchrun` starts them, PyTorch's DDP or FSDP2 averages their gradients.

A step has several backward passes (one for each segment, then depth 0), so gradients first add up
in each process. One last backward pass of zeros through the wrapped module, with every parameter,
makes DDP or FSDP average them. A process without a pack takes part in that pass too. Losses are
scaled by the number of processes beforehand.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from peagle.train.objective.passes import DrafterPasses


@dataclass(frozen=True, slots=True)
class World:
    """The processes of a run; rank 0 writes the files."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def sum_number(self, x: float, device: torch.device) -> float:
        """Sum a number over all processes; `device` is where their backend sums."""
        if self.size == 1:
            return x
        return float(self.all_reduce(torch.tensor(x, dtype=torch.float64, device=device)))

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def join_processes(device: str) -> tuple[World, str]:
    """Join the processes that torchrun started, if any; each of them uses its own GPU."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return World(), device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return World(dist.get_rank(), dist.get_world_size()), device


class GradientSync:
    """Averages the gradients of the passes over all processes."""

    def __init__(self, passes: DrafterPasses, world: World, kind: str) -> None:
        """`kind` is ddp or fsdp."""
        self.passes = passes
        self.world = world
        self.sharded = world.size > 1 and kind == "fsdp"
        self.wrapped: Any = passes
        if self.sharded:
            for block in passes.drafter.layers:
                fully_shard(block, reshard_after_forward=False)
            fully_shard(passes, reshard_after_forward=False)
            self._set_fsdp_sync(False)
        elif world.size > 1:
            self.wrapped = DistributedDataParallel(passes)
            # Buffers are the target's tables: equal in all processes, and large.
            self.wrapped.broadcast_buffers = False

    def average(self) -> None:
        """Replace the gradients by their averages over all processes."""
        if self.world.size == 1:
            return
        if self.sharded:
            self._set_fsdp_sync(True)
            # A process without a pack has not run a forward pass yet.
            for module in (self.passes, *self.passes.drafter.layers):
                module.unshard()
        self.wrapped("zero_loss").backward()
        if self.sharded:
            self._set_fsdp_sync(False)

    def _set_fsdp_sync(self, enabled: bool) -> None:
        assert isinstance(self.passes, FSDPModule)
        self.passes.set_requires_gradient_sync(enabled)
        self.passes.set_reshard_after_backward(enabled)

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradient to `max_norm` (0 only measures) and return its norm.

        The confidence output is left out: its gradient is independent of the drafter's.
        """
        parameters = [p for name, p in self.passes.named_parameters() if "confidence" not in name]
        norm = nn.utils.clip_grad_norm_(parameters, max_norm or float("inf"), foreach=True)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
