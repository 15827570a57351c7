"""The state of a run: written beside and renamed, the last two kept. A killed process loses its last steps, no more."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from peagle.errors import UserError
from peagle.train.optim.optimizer import Optimizers
from peagle.train.optim.parallel import World

KEPT = 2
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=False)


def save_state(
    folder: Path, step: int, passes: nn.Module, optimizers: Optimizers, world: World, more: dict
) -> None:
    """`step`: how many are done. Every process takes part; the first one writes."""
    state = {
        "step": step,
        "model": get_model_state_dict(passes, options=WHOLE),
        "optimizers": [
            get_optimizer_state_dict(passes, one, options=WHOLE) for one in optimizers.parts
        ],
        **more,
    }
    if world.first:
        _write(state, folder / f"step-{step:08d}.pt")
        for old in states(folder)[:-KEPT]:
            old.unlink()
    world.barrier()


def _write(state: dict[str, Any], final: Path) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    before = [path.name for path in states(final.parent)][-1:]
    partial = final.with_name(f".{final.name}")
    try:
        torch.save(state, partial)
        partial.replace(final)
    except (OSError, RuntimeError) as error:  # a full disk is either
        partial.unlink(missing_ok=True)
        kept = f"the state before it, {before[0]}, is kept" if before else "there is none before it"
        raise UserError(
            f"cannot write {final}: {first_line(error)}. Free some space and resume; {kept}"
        ) from error


def load_state(
    folder: Path, passes: nn.Module, optimizers: Optimizers, check: Callable[[dict[str, Any]], None]
) -> dict[str, Any] | None:
    """The newest state, put back into model and optimizers if `check` lets it pass; None: there is none."""
    if not (found := states(folder)):
        return None
    try:
        state = torch.load(found[-1], map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever the broken file brings up
        raise UserError(
            f"cannot read {found[-1]}: {first_line(error)}. Remove it: the state before it is used then"
        ) from error
    check(state)
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(passes, state.pop("model"), options=whole)
    for optimizer, kept in zip(optimizers.parts, state.pop("optimizers"), strict=True):
        set_optimizer_state_dict(passes, optimizer, kept, options=whole)
    return state


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def states(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"))
