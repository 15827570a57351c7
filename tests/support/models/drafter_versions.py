"""Two versions of a tiny drafter: the same network with other weights."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from peagle.core import Method
from peagle.drafter import Drafter
from peagle.drafter.replacement import private_copy
from peagle.engine import Engine
from peagle.loaded import LoadedPair
from peagle.target import Target
from tests.support.engine.engines import engine_of, pair_of, small
from tests.support.models.tiny_models import make_drafter, make_target
from tests.support.train.training import trained

# kind -> what `engine_of` takes besides
SHAPES: dict[str, dict[str, Any]] = {
    "p-eagle": {"k": 4},
    "p-eagle tree": {"k": 4, "tree": 12},
    "p-eagle adaptive": {"k": "auto"},
    "eagle3": {"k": 3},
    "all parts": {"k": 4},
    "all parts tree": {"k": 4, "tree": 12},
}


@dataclass(frozen=True)
class Versions:
    target: Target
    method: Method
    first: Drafter
    second: Drafter

    def pair(self, drafter: Drafter) -> LoadedPair:
        return pair_of(self.target, {self.method: drafter})

    def engine(self, drafter: Drafter, **options: Any) -> Engine:
        return engine_of(self.pair(drafter), self.method, **options)


def other_version(drafter: Drafter, target: Target, seed: int = 0, noise: float = 0.3) -> Drafter:
    """A drafter with noise on every weight, relative to its tensor, and on the calibration."""
    other = private_copy(drafter, target)
    generator = torch.Generator().manual_seed(seed)
    for parameter in other.parameters():
        change = torch.randn(parameter.shape, generator=generator).to(parameter)
        size = parameter.data.float().pow(2).mean().sqrt().clamp(min=0.02)
        parameter.data += (noise * size * change).to(parameter.dtype)
    if drafter.config.method == "p-eagle":
        other.config = replace(drafter.config, calibration=(1.5, 0.7))
    return other


def versions(kind: str) -> Versions:
    """Trained versions; "all parts" adds a dependency, a confidence and a draft vocabulary."""
    if kind.startswith("all parts"):
        run = trained("p-eagle", 48, "all")
        target, method, first = run.target, run.drafter.config.method, run.drafter
        first = private_copy(first, target)
        first.config = replace(first.config, calibration=(4.0,))
    else:
        target = small().target
        method = "eagle3" if kind == "eagle3" else "p-eagle"
        first = small().drafter(method)
    return Versions(target, method, first, other_version(first, target))


def untrained_versions(method: Method, dtype: torch.dtype, device: str = "cpu") -> Versions:
    target = make_target()
    target.model.to(device, dtype)
    parts: dict[str, Any] = {"dependency": 8, "refinement": 1} if method == "p-eagle" else {}
    plain = make_drafter(target, method, 2 if method == "p-eagle" else 1, **parts)
    first = other_version(plain, target, seed=1)
    return Versions(target, method, first, other_version(first, target))


def proposals(engine: Engine, prompt: list[int], tokens: int = 20) -> list[list[int]]:
    """The drafts of every step of an answer: the chain and the tree nodes."""
    stream = engine.add(prompt, max_tokens=tokens, ignore_eos=True)
    trees = engine.loop.stepper.slots.trees
    drafts = []
    while engine.step():
        if (state := engine.loop.states.get(stream.id)) is not None:
            shape = state.draft_shape
            drafts.append(trees.chain[state.slot, : shape.k].tolist())
            if not shape.is_chain:
                drafts.append(trees.nodes[state.slot, : shape.nodes].tolist())
                drafts.append(trees.parents[state.slot, : shape.nodes].tolist())
    return drafts
