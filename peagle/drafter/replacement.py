"""Replacement of a drafter by another version of it: the same network with other weights."""

from copy import deepcopy
from dataclasses import fields

import torch
from torch import Tensor

from peagle.drafter.config import DrafterConfig
from peagle.drafter.model import Drafter
from peagle.errors import UserError
from peagle.kernels.stored_matrix import StoredMatrix, Table
from peagle.target import Target

# Fields that may differ between two versions: none of them changes the network.
VERSION_FIELDS = frozenset({"calibration", "k_trained", "target", "target_revision", "trained"})
TABLES = ("embed_tokens", "lm_head")


def check_replacement(current: Drafter, new: Drafter, target: Target) -> None:
    """Raise UserError unless `new` is `current` with other weights or another calibration."""
    for field in fields(DrafterConfig):
        old_value, new_value = (getattr(x.config, field.name) for x in (current, new))
        if field.name not in VERSION_FIELDS and old_value != new_value:
            refuse(f"`{field.name}` is {new_value}, but the drafter in use has {old_value}")
    if not same_ids(current.target_ids, new.target_ids):
        refuse("`target_ids`, its draft vocabulary, holds other tokens than the drafter in use")
    old_tensors = drafter_tensors(current)
    for name, tensor in drafter_tensors(new).items():
        expected = old_tensors.get(name)
        if expected is not None and placement(tensor) != placement(expected):
            raise UserError(
                f"the new drafter has tensor {name} in {placement(tensor)}, the drafter in use has"
                f" it in {placement(expected)}: load it for the same target and dtype"
            )
    tables = (
        ("embed_tokens", current.embed_table, new.embed_table, target.embedding_table),
        ("lm_head", current.head_table, new.head_table, target.head_table),
    )
    for name, old_table, new_table, shared in tables:
        if address(old_table) == address(shared) != address(new_table):
            refuse(f"it has its own {name}, but the drafter in use shares the target's")


def refuse(reason: str) -> None:
    raise UserError(
        f"the new drafter cannot replace the one in use: {reason}. Only weights and calibration may"
        " change: start a new engine or server for another kind of drafter"
    )


def placement(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def same_ids(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second.to(first.device))


def address(table: Table) -> int:
    return (table.blocks if isinstance(table, StoredMatrix) else table).data_ptr()


def private_copy(drafter: Drafter, target: Target) -> Drafter:
    """A copy whose weights may be overwritten; tables of the target stay shared."""
    memo: dict[int, object] = {}
    for table, shared in (
        (drafter.embed_table, target.embedding_table),
        (drafter.head_table, target.head_table),
    ):
        if address(table) == address(shared):
            memo[id(table)] = table
    return deepcopy(drafter, memo)


@torch.no_grad()
def copy_weights(source: Drafter, destination: Drafter) -> None:
    """Overwrite the weights of a private copy; those shared with the target stay as they are.

    Tensors keep their addresses, which CUDA graphs have recorded.
    """
    new = drafter_tensors(source)
    for name, tensor in drafter_tensors(destination).items():
        if tensor.data_ptr() != new[name].data_ptr():
            tensor.copy_(new[name])
    destination.config = source.config


def drafter_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """Everything that differs between two versions, by name."""
    tables = {name: getattr(drafter, name) for name in TABLES}
    return drafter.state_dict() | {name: x for name, x in tables.items() if x is not None}
