"""The candidate of a round: the trained weights, perhaps mixed with the current ones."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from peagle.drafter import Drafter
from peagle.drafter.formats import checkpoint, compact
from peagle.errors import UserError
from peagle.target import Target
from peagle.train.data.documents import Documents
from peagle.train.evaluation.acceptance import DraftReplay
from peagle.train.evaluation.calibration import calibrate

STORED_DTYPE = torch.bfloat16
MAX_CODE = 127  # of weights in 8 bits
DITHER = 0.999  # Width of the noise in steps of a row: below 1, weights on the grid stay there.


def mix_weights(current: Drafter, trained: Drafter, share: float) -> Drafter:
    """A copy of the trained drafter whose weights are `share` trained and the rest current.

    They are rounded as they are stored: the judge sees exactly the drafter that will serve.
    """
    weights: dict[str, Tensor] = {}
    before = current.state_dict()
    on_cpu = current.fc.weight.device.type == "cpu"
    for name, tensor in trained.state_dict().items():
        mixed_tensor = torch.lerp(before[name].float(), tensor.float(), share)
        if on_cpu and tensor.ndim == 2:  # An engine on a CPU may draft in 8 bits.
            mixed_tensor = dither_rows(mixed_tensor)
        weights[name] = mixed_tensor.to(STORED_DTYPE).float()
    mixed = Drafter(current.config, current.context).to(current.fc.weight.device)
    mixed.set_embed_and_head(current.embed_table, current.head_table, current.target_ids)
    mixed.load_state_dict(weights)
    return mixed.eval().requires_grad_(False)


def dither_rows(matrix: Tensor) -> Tensor:
    """Round each row to the 255 values that 8 bits have, at random, to the nearer one more often.

    An engine on a CPU drafts with such values. What a round changes is less than half of a step for
    most weights: rounding to the nearest would undo it. At random, the mean change stays.
    """
    peak = matrix.abs().amax(1, keepdim=True)
    step = (peak / MAX_CODE).clamp(min=torch.finfo(torch.float32).tiny)
    generator = torch.Generator().manual_seed(0)
    noise = DITHER * (torch.rand(matrix.shape, generator=generator) - 0.5)
    codes = (matrix / step + noise).round().clamp(-MAX_CODE, MAX_CODE)
    codes = torch.where(matrix.abs() == peak, matrix.sign() * MAX_CODE, codes)  # The step stays.
    return codes * step


def calibrate_candidate(candidate: Drafter, replay: DraftReplay, documents: Documents) -> None:
    """Fit the calibration factors again, if the drafter has some."""
    config = candidate.config
    if config.calibration:
        factors = calibrate(replay, documents, len(config.calibration)).factors
        candidate.config = replace(config, calibration=factors)


def save_candidate(candidate: Drafter, folder: Path, target: Target) -> None:
    """Write the drafter, read it again, and check that it can replace the current one."""
    compact.save(candidate, folder, target, STORED_DTYPE)
    stored = checkpoint.read(folder)
    if replace(stored.config, calibration=candidate.config.calibration) != candidate.config:
        raise UserError(f"the config of the drafter in {folder} differs from the current one's")
    for name, tensor in stored.tensors.items():
        if isinstance(tensor, Tensor) and not torch.isfinite(tensor.float()).all():
            raise UserError(f"the candidate's {name} has values that are not finite")
