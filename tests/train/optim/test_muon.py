"""Muon equals PyTorch's, although it batches matrices of one shape; learning rate schedules."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from peagle.train.config import TrainConfig
from peagle.train.optim.muon import Muon, orthogonalize
from peagle.train.optim.optimizer import Optimizers
from tests.support.models.tiny_models import make_drafter, make_target

SHAPES = [(8, 8), (8, 24), (24, 8), (8, 8), (5, 7)]
OPTIONS = {"lr": 0.02, "weight_decay": 0.1}


def matrices() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in SHAPES]


def step(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], seed: int, leave_out: int = -1
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for i, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if i == leave_out else gradient
    optimizer.step()


def torch_muon(parameters: list[nn.Parameter], **options: object) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, adjust_lr_fn="match_rms_adamw", **(OPTIONS | options))


def assert_close(mine: list[nn.Parameter], expected: list[nn.Parameter], moved_by: float) -> None:
    """Batched iterations in bfloat16 round differently, by a few percent of an update."""
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a.data, b.data, rtol=0, atol=0.05 * moved_by)


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.0}, {"nesterov": False}, {"momentum": 0.5}], ids=str
)
def test_equals_torch(options: dict):
    mine, expected = matrices(), matrices()
    ours, plain = Muon(mine, **(OPTIONS | options)), torch_muon(expected, **options)
    for seed in range(5):
        step(ours, mine, seed, leave_out=2 if seed == 3 else -1)
        step(plain, expected, seed, leave_out=2 if seed == 3 else -1)
    moved = float((expected[0] - matrices()[0]).detach().abs().max())
    assert moved > 0.02
    assert_close(mine, expected, moved)


@pytest.mark.parametrize("back", [False, True])
def test_states_are_interchangeable(back: bool):
    """Three steps with one optimizer and two with the other equal five steps of torch."""
    mine, expected = matrices(), matrices()
    ours, plain = Muon(mine, **OPTIONS), torch_muon(expected)
    straight = matrices()
    reference = torch_muon(straight)
    for seed in range(3):
        step(ours, mine, seed)
        step(plain, expected, seed)
        step(reference, straight, seed)
    first, second = (expected, mine) if back else (mine, expected)
    source, destination = (plain, ours) if back else (ours, plain)
    for a, b in zip(first, second, strict=True):
        b.data.copy_(a.data)
    assert source.state_dict().keys() == destination.state_dict().keys()
    destination.load_state_dict(copy.deepcopy(source.state_dict()))
    for seed in range(3, 5):
        step(destination, second, seed)
        step(reference, straight, seed)
    assert_close(second, straight, 0.1)


def test_the_update_is_orthogonal():
    """Singular values of the update are near 1 for any gradient."""
    x = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(1)) * 100
    for y in (
        orthogonalize(x, (3.4445, -4.775, 2.0315), 5, 1e-7),
        orthogonalize(x.mT, (3.4445, -4.775, 2.0315), 5, 1e-7),
    ):
        values = torch.linalg.svdvals(y.float())
        assert float(values.min()) > 0.6 and float(values.max()) < 1.3


def make_optimizers(optimizer: str) -> tuple[nn.Module, Optimizers]:
    drafter = make_drafter(make_target(), "p-eagle", 2).requires_grad_(True)
    drafter.make_embeddings_trainable()
    return drafter, Optimizers(drafter, TrainConfig(optimizer=optimizer, lr=0.01, warmup=0.2), 20)


def test_muon_gets_the_matrices_and_adamw_the_rest():
    drafter, optimizers = make_optimizers("muon")
    names = {id(p): name for name, p in drafter.named_parameters()}
    adamw, muon = (
        [names[id(p)] for group in part.param_groups for p in group["params"]]
        for part in optimizers.parts
    )
    assert sorted(adamw + muon) == sorted(names.values()), (
        "every parameter must have exactly one optimizer"
    )
    assert "embed_tokens" in adamw and "mask_hidden" in adamw and "fc.weight" in muon
    assert all(name.endswith("proj.weight") or name == "fc.weight" for name in muon)
    assert len(make_optimizers("adamw")[1].parts) == 1


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_changes_every_parameter_and_clears_gradients(optimizer: str):
    drafter, optimizers = make_optimizers(optimizer)
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    for p in drafter.parameters():
        p.grad = torch.ones_like(p)
    assert optimizers.step(0) == 0.25
    for name, p in drafter.named_parameters():
        assert p.grad is None and not torch.equal(p, before[name]), name
    assert all(group["lr"] == 0.0025 for part in optimizers.parts for group in part.param_groups)


@pytest.mark.parametrize(("optimizer", "largest_step"), [("adamw", 8), ("muon", 1)])
def test_the_gate_of_a_convolution_changes_slowly(optimizer: str, largest_step: float):
    """Outputs of the gate and `base` are factors of a state; `base` changes by lr."""
    drafter = make_drafter(make_target(), "p-eagle", 2, convolution=True).requires_grad_(True)
    optimizers = Optimizers(drafter, TrainConfig(optimizer=optimizer, lr=0.01, warmup=0.0), 20)
    convolution = drafter.convolution[0]
    d = len(convolution.base)
    rows = torch.randn(5, d, generator=torch.Generator().manual_seed(0))
    rows *= d**0.5 / rows.norm(dim=1, keepdim=True)
    for p in drafter.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    convolution.gate.weight.grad = torch.ones(len(convolution.gate.weight), 5) @ rows
    optimizers.step(0)
    lr = float(convolution.base.detach().abs().max())
    assert lr == pytest.approx(0.01, rel=1e-3)
    largest = float(convolution.gate(rows).detach().abs().max())
    assert lr / 10 < largest < largest_step * lr, largest / lr


LR_FRACTIONS: dict[str, list[Tensor | float]] = {
    "cosine": [0.1 + 0.9 * (1 + math.cos(math.pi * i / 8)) / 2 for i in range(9)],
    "linear": [0.1 + 0.9 * (1 - i / 8) for i in range(9)],
    "constant": [1.0] * 9,
}


@pytest.mark.parametrize("schedule", LR_FRACTIONS)
def test_schedules(schedule: str):
    config = TrainConfig(schedule=schedule, warmup=0.2, final_lr=0.1)
    optimizers = Optimizers(nn.Linear(2, 2), config, 10)
    assert [optimizers.lr_fraction(i) for i in range(2)] == [0.5, 1.0]
    assert optimizers.lr_fraction(1.9) == 1.0, (
        "a fractional step after the warmup has the peak rate"
    )
    assert [optimizers.lr_fraction(i) for i in range(2, 11)] == pytest.approx(
        LR_FRACTIONS[schedule]
    )
