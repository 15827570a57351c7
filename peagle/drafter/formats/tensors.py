"""The tensors of a drafter by our own names: which exist, in which shape, and how they are read.

Our names are those of `Drafter.state_dict()` and of what is shared with the target:
`embed_tokens.weight`, `lm_head.weight`, and for a pruned vocabulary `target_ids` (draft id ->
target id).
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.drafter.config import DrafterConfig
from peagle.drafter.model import Drafter
from peagle.errors import UserError
from peagle.kernels.stored_matrix import StoredMatrix, Table
from peagle.target.meta_initialization import no_meta_initialization

Shapes = dict[str, tuple[int, ...]]
SHARED_TENSORS = ("embed_tokens.weight", "lm_head.weight", "target_ids")


def own_shapes(config: DrafterConfig) -> Shapes:
    """Shapes of the tensors that only the drafter has."""
    with no_meta_initialization(), torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}


def shared_shapes(config: DrafterConfig) -> Shapes:
    """Shapes of the tensors that the drafter may share with the target."""
    shapes: Shapes = {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "lm_head.weight": (config.draft_vocab_size, config.hidden_size),
    }
    return shapes | ({"target_ids": (config.draft_vocab_size,)} if config.pruned else {})


def build_drafter(
    config: DrafterConfig,
    tensors: Mapping[str, Table],
    dtype: torch.dtype,
    device: torch.device,
    context: int | None = None,
    matrix_dtype: torch.dtype | None = None,
) -> Drafter:
    """Build a drafter from complete tensors: its own and the shared ones.

    `matrix_dtype`: of its own matrices; None: `dtype`.
    """
    shared: dict[str, Table] = {}
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, StoredMatrix):
            shared[name] = tensor
            continue
        is_own = name not in SHARED_TENSORS
        is_matrix = is_own and tensor.ndim == 2
        float_dtype = matrix_dtype or dtype if is_matrix else dtype
        moved = tensor.to(device, float_dtype if tensor.is_floating_point() else None)
        (own if is_own else shared)[name] = moved
    with no_meta_initialization(), torch.device("meta"):
        drafter = Drafter(config, context)
    rope = Drafter.make_rope(config, context)
    drafter.load_state_dict(own, assign=True)
    drafter.rope = rope.to(device)
    ids = shared.get("target_ids")
    assert not isinstance(ids, StoredMatrix)
    drafter.set_embed_and_head(shared["embed_tokens.weight"], shared["lm_head.weight"], ids)
    return drafter.eval().requires_grad_(False)


def read_json(path: Path) -> dict:
    if not path.is_file():
        raise UserError(f"no drafter in {path.parent}: {path.name} is missing")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(
            f"{path} is not valid JSON ({error}): write the checkpoint again"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object: write the checkpoint again")
    return content


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files, by the names in the files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"no drafter in {folder}: there is no .safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                tensors |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file} cannot be read ({error}): copy or write the checkpoint again"
            ) from error
    return tensors
