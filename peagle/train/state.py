"""The state of a run, written atomically; the last two are kept.

A killed process loses only the steps after its last state.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from peagle.errors import UserError
from peagle.train.config import TrainConfig
from peagle.train.optim.optimizer import Optimizers
from peagle.train.optim.parallel import World

# Config keys that a resumed run may change, because the trained weights do not depend on them.
CHANGEABLE_KEYS = (
    "out",
    "data",
    "device",
    "compile",
    "remember",
    "log_every",
    "save_every",
    "eval_every",
    "eval_k",
    "checkpointing",
    "segments",
    "bits",
    "minutes",  # A run may get more time; its learning rate follows the clock anyway.
)
KEPT_STATES = 2
FULL_STATE = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=False)


@dataclass(frozen=True, slots=True)
class RunState:
    """What a state holds beside the weights and the optimizers."""

    step: int  # steps done
    config: dict[str, Any]  # keys and values of the TrainConfig
    data: str  # digest of the documents
    seconds: float  # of training
    tokens: int  # of documents, seen by the target
    clock: float | None = None  # seconds that count for `minutes`; older states have none
    scales: list[Tensor] = field(default_factory=list)  # of rounded weights


def save_state(
    folder: Path, state: RunState, passes: nn.Module, optimizers: Optimizers, world: World
) -> None:
    """Save a state. Every process takes part; the main process writes."""
    values = {
        "step": state.step,
        "model": get_model_state_dict(passes, options=FULL_STATE),
        "optimizers": [
            get_optimizer_state_dict(passes, part, options=FULL_STATE) for part in optimizers.parts
        ],
        **asdict(state),
    }
    if world.is_main:
        _write(values, folder / f"step-{state.step:08d}.pt")
        for old in list_states(folder)[:-KEPT_STATES]:
            old.unlink()
    world.barrier()


def _write(values: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    previous = [state.name for state in list_states(path.parent)][-1:]
    partial = path.with_name(f".{path.name}")
    try:
        torch.save(values, partial)
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # A full disk raises either.
        partial.unlink(missing_ok=True)
        kept = f"the previous state, {previous[0]}, is kept" if previous else "no state is kept"
        raise UserError(
            f"cannot write {path}: {_first_line(error)}. Free some space and resume; {kept}"
        ) from error


def load_state(
    folder: Path, passes: nn.Module, optimizers: Optimizers, check: Callable[[RunState], None]
) -> RunState | None:
    """Restore model and optimizers from the newest state; None if there is none.

    `check` may refuse the state by raising an error.
    """
    paths = list_states(folder)
    if not paths:
        return None
    newest = paths[-1]
    try:
        values = torch.load(newest, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for a broken file.
        raise UserError(
            f"cannot read {newest}: {_first_line(error)}. Remove it to use the previous state"
        ) from error
    names = [item.name for item in fields(RunState)]
    state = RunState(**{name: values[name] for name in names if name in values})
    check(state)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(passes, values["model"], options=options)
    for optimizer, saved in zip(optimizers.parts, values["optimizers"], strict=True):
        set_optimizer_state_dict(passes, optimizer, saved, options=options)
    return state


def check_same_run(state: RunState, config: TrainConfig, digest: str, out: Path) -> None:
    """Refuse a state of other documents or another config; missing keys have their defaults."""
    current = asdict(config)
    for key, value in (asdict(TrainConfig()) | state.config).items():
        value = tuple(value) if isinstance(value, list) else value
        if key not in CHANGEABLE_KEYS and current.get(key) != value:
            raise UserError(
                f"the run in {out} was started with {key} = {value!r}, now it is"
                f" {current.get(key)!r}: restore it, or give another `out`"
            )
    if state.data != digest:
        raise UserError(
            f"the run in {out} was started with other documents: give another `out`,"
            f" or remove {out / 'state'} to begin again with these"
        )


def list_states(folder: Path) -> list[Path]:
    """The states in a folder, the newest last."""
    return sorted(folder.glob("step-*.pt"))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
