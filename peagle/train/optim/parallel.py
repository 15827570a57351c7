"""One process or many: `torchrun` starts them, PyTorch's DDP or FSDP2 joins their gradients.

A step runs several backwards (a segment each, then depth 0), so gradients first add up in each process; one last
backward of zeros through the wrapped module, in which every parameter takes part, makes DDP or FSDP average them. A
process without a pack of its own takes part in that one too. Losses are scaled by the number of processes before.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from peagle.train.objective.passes import Passes


@dataclass(frozen=True, slots=True)
class World:
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def total(self, x: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def number(self, x: float, device: torch.device) -> float:
        """The sum over all processes of a number; `device`: where their backend sums."""
        return (
            x
            if self.size == 1
            else float(self.total(torch.tensor(x, dtype=torch.float64, device=device)))
        )

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def start(device: str) -> tuple[World, str]:
    """Joins the processes torchrun started, if any; each takes its own GPU."""
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return World(), device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return World(dist.get_rank(), dist.get_world_size()), device


class Joined:
    """The passes as one process sees them, and `sync`, after which gradients are the averages over all."""

    def __init__(self, passes: Passes, world: World, kind: str) -> None:
        self.passes, self.world = passes, world
        self.sharded = world.size > 1 and kind == "fsdp"
        self.wrapped: Any = passes
        if self.sharded:
            for block in passes.drafter.layers:
                fully_shard(block, reshard_after_forward=False)
            fully_shard(passes, reshard_after_forward=False)
            self._collect(False)
        elif world.size > 1:
            self.wrapped = DistributedDataParallel(passes)
            self.wrapped.broadcast_buffers = (
                False  # they are the target's tables, equal everywhere, and large
            )

    def sync(self) -> None:
        if self.world.size == 1:
            return
        if self.sharded:
            self._collect(True)
            for module in (
                self.passes,
                *self.passes.drafter.layers,
            ):  # a process without a pack has not yet
                module.unshard()
        self.wrapped("touch").backward()
        if self.sharded:
            self._collect(False)

    def _collect(self, on: bool) -> None:
        assert isinstance(self.passes, FSDPModule)
        self.passes.set_requires_gradient_sync(on)
        self.passes.set_reshard_after_backward(on)

    def clip(self, limit: float) -> Tensor:
        """The norm of the gradient, cut to `limit` (0: only measured); the confidence output learns for itself."""
        parameters = [p for name, p in self.passes.named_parameters() if "confidence" not in name]
        norm = nn.utils.clip_grad_norm_(parameters, limit or float("inf"), foreach=True)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
