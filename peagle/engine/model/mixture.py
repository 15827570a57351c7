"""Mixture: the MLP of a layer with experts, over kernels that read only touched experts.

A matrix is read once for each block of an expert's rows (kernels/triton/experts/tiles.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from peagle.engine.model.cpu_experts import CpuExperts
from peagle.engine.model.weight import Weight
from peagle.kernels.cpu.experts import PackedMoe
from peagle.kernels.expert_matrices import ExpertMatrices, GatedActivation
from peagle.kernels.triton.add_norm import add_norm
from peagle.kernels.triton.experts.expert_gemm import expert_down, expert_gate_up
from peagle.kernels.triton.experts.norm_route import norm_route, supports_norm_route
from peagle.kernels.triton.experts.route import BLOCK_ROWS, RouterParams, Routing, route
from peagle.target.experts.stored_experts import StoredExperts

MIXTURE_PARTS = ({"router", "experts"}, {"gate", "experts"})
SILU_CLASSES = ("SiLU", "SiLUActivation")
MAX_ROWS = 1 << 16  # of a pass


@dataclass(frozen=True, slots=True)
class RouterCounters:
    """What the router of one mixture counts in on the device; see route.py."""

    counts: Tensor  # [E + 1] int32, a row of all_counts
    all_counts: Tensor  # [mixtures, E + 1] int32, zero when a pass begins
    arrived: Tensor  # int32, zero between launches; shared by all mixtures


@dataclass(frozen=True, slots=True)
class Mixture:
    router_weight: Tensor  # [E, d]
    router_bias: Tensor | None
    router: RouterParams
    gate_up: ExpertMatrices
    down: ExpertMatrices
    activation: GatedActivation
    counters: RouterCounters
    packed_router: Weight  # the same weight and bias, as the C kernels read them
    cpu_experts: CpuExperts

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, d] -> [T, d], or parts [top_k, T, d], which add_norm adds.

        The counts of the pass must be zero; they take the rows of each expert.
        """
        counters = self.counters
        routing = route(
            x, self.router_weight, self.router_bias, self.router, counters.counts, counters.arrived
        )
        return self._experts(x, routing)

    def add_norm(
        self, x: Tensor, residual: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The mixture of norm(x + residual), and this sum; x may come as partial sums."""
        if not supports_norm_route(x, residual, self.router_weight):
            normed, total = add_norm(x, residual, norm, eps)
            return self(normed), total
        counters = self.counters
        routed = norm_route(
            x,
            residual,
            norm,
            eps,
            self.router_weight,
            self.router_bias,
            self.router,
            counters.counts,
            counters.arrived,
        )
        return self._experts(routed.normed, routed.routing), routed.total

    def _experts(self, x: Tensor, routing: Routing) -> Tensor:
        packed = self.cpu_experts.packed
        if packed is not None:
            return packed(x, routing.experts, routing.weights)
        hidden = expert_gate_up(x, self.gate_up, self.activation, routing)
        return expert_down(hidden, self.down, routing)

    @property
    def packed_moe(self) -> PackedMoe | None:
        """The whole mixture in one C call; None if the router or the experts are not packed."""
        router = self.packed_router.matrix
        experts = self.cpu_experts.packed
        if router is None or experts is None:
            return None
        params = self.router
        return PackedMoe(experts, router, params.top_k, params.normalized, self.counters.counts)

    @property
    def expert_bytes(self) -> int:
        """Bytes that the products with one expert read."""
        packed = self.cpu_experts.packed
        if packed is not None:
            return packed.nbytes // packed.num_experts
        return self.gate_up.expert_bytes + self.down.expert_bytes

    def quantize(self) -> None:
        """Multiply with experts in int8 from now on. The router keeps its precision."""
        self.cpu_experts.quantize()

    @property
    def weights(self) -> list[Weight]:
        """Matrices of linear layers, of which a mixture has none."""
        return []


def router_counters(mlps: Sequence[nn.Module], device: torch.device) -> list[RouterCounters | None]:
    """For each layer's MLP; None for a dense one."""
    routers = [find_router(mlp) for mlp in mlps]
    sizes = [len(router.weight) for router in routers if router is not None]
    if not sizes:
        return [None] * len(routers)
    all_counts = torch.zeros(len(sizes), max(sizes) + 1, dtype=torch.int32, device=device)
    arrived = torch.zeros(MAX_ROWS // BLOCK_ROWS, dtype=torch.int32, device=device)
    rows = iter(all_counts)
    return [
        None if router is None else RouterCounters(next(rows), all_counts, arrived)
        for router in routers
    ]


def find_router(mlp: Any) -> Any:
    """The router of a mixture; None for a dense MLP."""
    if not hasattr(mlp, "experts"):
        return None
    return mlp.router if hasattr(mlp, "router") else getattr(mlp, "gate", None)


def is_supported_mixture(mlp: Any) -> bool:
    """Whether an MLP is a router with a softmax and gated experts, and nothing else.

    Whether the router's weights are as expected is found by comparing the results.
    """
    router = find_router(mlp)
    if router is None or {name for name, _ in mlp.named_children()} not in MIXTURE_PARTS:
        return False
    is_plain_router = {name for name, _ in router.named_parameters()} <= {"weight", "bias"}
    return (
        is_plain_router
        and isinstance(getattr(router, "top_k", None), int)
        and not list(router.buffers())
        and is_supported_experts(mlp.experts)
    )


def is_supported_experts(experts: Any) -> bool:
    if isinstance(experts, StoredExperts):
        return True
    names = {name for name, _ in experts.named_parameters()}
    projections = {"gate_up_proj", "down_proj"}
    biases = {"gate_up_proj_bias", "down_proj_bias"}
    is_silu = type(getattr(experts, "act_fn", None)).__name__ in SILU_CLASSES
    is_clamped = hasattr(experts, "alpha") and hasattr(experts, "limit")
    return names in (projections, projections | biases) and (is_silu or is_clamped)


def build_mixture(mlp: Any, dtype: torch.dtype, counters: RouterCounters) -> Mixture:
    """From the MLP of a layer of Qwen3-MoE, Mixtral or GPT-OSS in transformers.

    `dtype`: of the rows.
    """
    router = find_router(mlp)
    bias = getattr(router, "bias", None)
    experts = mlp.experts
    if isinstance(experts, StoredExperts):
        gate_up, down = experts.gate_up, experts.down
        if gate_up.weight.is_cuda:
            gate_up, down = gate_up.for_gpu(dtype), down.for_gpu(dtype)
        activation = experts.activation
    else:
        activation = activation_of(experts)
        gate_up = expert_matrices(experts, "gate_up_proj")
        down = expert_matrices(experts, "down_proj")
    return Mixture(
        router.weight.detach(),
        None if bias is None else bias.detach(),
        RouterParams(router.top_k, getattr(router, "norm_topk_prob", True)),
        gate_up,
        down,
        activation,
        counters,
        Weight(router.weight, bias, dtype=dtype),
        CpuExperts(gate_up, down, activation, dtype),
    )


def activation_of(experts: Any) -> GatedActivation:
    if hasattr(experts, "limit"):  # GPT-OSS
        return GatedActivation(True, experts.alpha, experts.limit, up_shift=1.0)
    return GatedActivation()


def expert_matrices(experts: Any, name: str) -> ExpertMatrices:
    """The parameter as [E, outputs, inputs]; its memory is rearranged if it is transposed."""
    parameter = getattr(experts, name)
    bias = getattr(experts, f"{name}_bias", None)
    weight = parameter.data
    if is_transposed(experts):
        if not weight.transpose(1, 2).is_contiguous():
            parameter.data = weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
        weight = weight.transpose(1, 2)
    return ExpertMatrices(weight, None, None if bias is None else bias.detach())


def is_transposed(experts: Any) -> bool:
    """Whether the matrices are [inputs, outputs], as in GPT-OSS."""
    return bool(getattr(experts, "is_transposed", False))
