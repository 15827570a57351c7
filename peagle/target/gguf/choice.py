"""Which weights of a target run: those of a GGUF file as stored, or its safetensors."""

from pathlib import Path
from typing import NamedTuple

import torch

from peagle.kernels.cpu.library import library
from peagle.paths import STORED_FILE
from peagle.target.precision import SpeedChoice, choose_dtype


class WeightChoice(NamedTuple):
    stored: bool  # keep the weights of the GGUF file, or of the one in the folder, as stored
    dtype: torch.dtype  # of the activations, and of weights that are not as stored
    speed: SpeedChoice | None = None  # the measurement behind it, if there was one


def choose_weights(path: Path, dtype: str, device: str, allow_stored: bool = True) -> WeightChoice:
    """The weights that run for `path` (a folder or a GGUF file), and the dtype of activations.

    On a CPU with dtype "auto", weights as stored run with float32 activations: they lose nothing,
    and a step reads the fewest bytes. A folder's are used only if the C kernels read them.
    """
    if not allow_stored or not device.startswith("cpu"):
        return WeightChoice(False, choose_dtype(dtype, device))
    if path.is_file():
        return WeightChoice(True, torch.float32 if dtype == "auto" else choose_dtype(dtype, device))
    if dtype == "auto" and (path / STORED_FILE).is_file() and library() is not None:
        return WeightChoice(True, torch.float32)
    return WeightChoice(False, choose_dtype(dtype, device))
