"""Which weights of a target run: those of a GGUF file as stored, or its safetensors."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

from peagle.paths import STORED_FILE
from peagle.target.gguf.config_folder import config_folder
from peagle.target.gguf.header import GGUFHeader, read_header
from peagle.target.matrix_shapes import read_shapes
from peagle.target.precision import Measure, SpeedChoice, choose_dtype, measured_choice
from peagle.target.weight_speed import measure_passes


class WeightChoice(NamedTuple):
    stored: bool  # keep the weights of the GGUF file, or of the one in the folder, as stored
    dtype: torch.dtype  # of the activations, and of weights that are not as stored
    speed: SpeedChoice | None = None  # the measurement behind it, if there was one


def choose_weights(
    path: Path,
    dtype: str,
    device: str,
    allow_stored: bool = True,
    measure: Measure = measure_passes,
    has_stored: bool = False,
) -> WeightChoice:
    """The weights that run for `path` (a folder or a GGUF file), and the dtype of activations.

    A GGUF file runs as stored on a CPU; with dtype "auto" its activations are float32 unless
    bfloat16 is clearly faster here (precision.py). With dtype "auto" on a CPU, a folder that has
    one runs as stored unless its safetensors are clearly faster.

    `has_stored`: whether the STORED_FILE of a folder has the same weights as its safetensors. Of
    another file by this name nobody knows what it holds.
    """
    on_cpu = device.startswith("cpu")
    is_file = path.is_file()
    if dtype != "auto" or not on_cpu:
        return WeightChoice(on_cpu and allow_stored and is_file, choose_dtype(dtype, device))
    file = path if is_file else path / STORED_FILE
    is_usable = allow_stored and (is_file or has_stored) and file.is_file()
    header = read_header(file) if is_usable else None
    folder = config_folder(header) if is_file and header is not None else path
    stored_format = None if header is None else main_format(header)
    speed = measured_choice(read_shapes(folder), stored_format, measure)
    if is_file and allow_stored:
        speed = speed.among_stored()
        return WeightChoice(True, speed.dtype, speed)
    return WeightChoice(speed.stored, speed.dtype, speed)


def main_format(header: GGUFHeader) -> str | None:
    """The format of most bytes of the matrices; None if there are no matrices."""
    sizes: Counter[str] = Counter()
    for info in header.tensors.values():
        if len(info.shape) == 2:
            sizes[info.format] += info.size
    return sizes.most_common(1)[0][0] if sizes else None
