"""`peagle quantize`: write a target in fewer bits, in a folder that vLLM serves.

The matrices of linear layers and of experts are quantized; embeddings, lm_head, routers, norms and
biases are copied. Each file of the source becomes a file of the same name, one after another, so
that only one of them is in memory.
"""

import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from peagle.errors import UserError
from peagle.paths import publish_folder, save_tensors, write_json
from peagle.progress import Progress, silent
from peagle.target.experts.mxfp4_read import has_mxfp4
from peagle.target.loading_error import loading_reason
from peagle.target.quantized.card import TITLE, card
from peagle.target.quantized.codes import quantize_matrix
from peagle.target.quantized.formats import WeightFormat, quantization_config
from peagle.target.quantized.layout import WEIGHT, weight_tensors
from peagle.target.quantized.matrix_choice import MatrixChoice, choose_matrices
from peagle.target.quantized.read import read_quantization
from peagle.target.quantized.shards import INDEX, read_shard, shard_paths

NOT_COPIED = ("README.md", "peagle.json", INDEX)  # each folder has its own
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth")


@dataclass(slots=True)
class QuantizationReport:
    """Sizes and errors. The error of a matrix is |codes * scales - W| / |W|."""

    format: str
    group: int | None
    expert_matrices: int = 0  # how many of the matrices belong to experts
    bytes_before: int = 0
    bytes_after: int = 0
    errors: dict[str, float] = field(default_factory=dict)  # by matrix
    difference_squares: float = 0.0  # sums over all matrices
    weight_squares: float = 0.0

    @property
    def error(self) -> float:
        """The error of all matrices together."""
        if not self.weight_squares:
            return 0.0
        return math.sqrt(self.difference_squares / self.weight_squares)

    @property
    def worst(self) -> str:
        """The matrix with the largest error."""
        return max(self.errors, key=self.errors.__getitem__)

    def add(self, name: str, before: Tensor, after: Tensor) -> None:
        difference = float((after - before).square().sum())
        length = float(before.square().sum())
        self.errors[name] = math.sqrt(difference / length) if length else 0.0
        self.difference_squares += difference
        self.weight_squares += length

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "group": self.group,
            "matrices": len(self.errors),
            "expert_matrices": self.expert_matrices,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "error": round(self.error, 6),
            "worst": self.worst,
            "worst_error": round(self.errors[self.worst], 6),
        }


def quantize(
    source: Path,
    out: Path,
    format: WeightFormat,
    progress: Progress = silent,
    group: int | None = None,
) -> QuantizationReport:
    """Write `out` atomically: it appears complete or not at all.

    `group` is the number of inputs that share a scale in int4; None: the largest possible.
    """
    out = check_out_folder(out, source)
    choice = choose_matrices(build_without_weights(source))
    group = format.choose_group_size(choice.inputs.values(), group)
    report = QuantizationReport(format.name, group, choice.expert_matrices)
    with publish_folder(out) as staging:
        for file in source.iterdir():
            copied = file.name not in NOT_COPIED and file.suffix not in WEIGHT_SUFFIXES
            if file.is_file() and copied:
                shutil.copyfile(file, staging / file.name)
        weight_map = write_shards(source, staging, choice, format, report, progress)
        if (source / INDEX).is_file():
            index = {"metadata": {"total_size": report.bytes_after}, "weight_map": weight_map}
            write_json(staging / INDEX, index)
        config = json.loads((source / "config.json").read_text())
        quantization = quantization_config(format, report.group, choice.ignored)
        write_json(staging / "config.json", config | {"quantization_config": quantization})
        (staging / "README.md").write_text(card(source, config, report))
    return report


def write_shards(
    source: Path,
    staging: Path,
    choice: MatrixChoice,
    format: WeightFormat,
    report: QuantizationReport,
    progress: Progress,
) -> dict[str, str]:
    """Quantize all files; return tensor name -> file name."""
    paths = shard_paths(source)
    missing = set(choice.inputs)
    weight_map: dict[str, str] = {}
    what = f"rounding to {format.name}"
    total = sum(path.stat().st_size for path in paths)
    done = 0
    for path in paths:
        tensors: dict[str, Tensor] = {}
        for name, tensor in choice.tensors_in_files(read_shard(path)):
            module = name.removesuffix(WEIGHT)
            if name.endswith(WEIGHT) and module in choice.inputs:
                tensors |= quantize_weight(module, tensor, format, report)
                missing.discard(module)
            else:
                tensors[name] = tensor
            report.bytes_before += tensor.nbytes
            done += tensor.nbytes
            progress(what, min(done, total), total)
        save_tensors(tensors, staging / path.name)
        weight_map |= dict.fromkeys(tensors, path.name)
        report.bytes_after += sum(tensor.nbytes for tensor in tensors.values())
    progress(what, total, total)
    if missing:
        raise UserError(f"the target in {source} lacks {min(missing)}{WEIGHT}: copy it again")
    return weight_map


def quantize_weight(
    module: str, tensor: Tensor, format: WeightFormat, report: QuantizationReport
) -> dict[str, Tensor]:
    if not tensor.isfinite().all():
        raise UserError(f"{module}{WEIGHT} is not finite: such a target cannot be quantized")
    weight = quantize_matrix(tensor, format, report.group)
    report.add(module, tensor.float(), weight.matrix(torch.float32))
    return weight_tensors(module, weight, format)


def build_without_weights(source: Path) -> Any:
    if not (source / "config.json").is_file():
        raise UserError(
            f"no target in {source}: config.json is missing. Give a folder from `peagle pull`"
        )
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers raises exceptions of any type
        raise UserError(
            f"transformers cannot read the target in {source}: {loading_reason(error)}"
        ) from error
    if getattr(config, "quantization_config", None):
        raise UserError(f"the target in {source} is quantized already: give its source")
    return model


def check_out_folder(out: Path, source: Path) -> Path:
    """The absolute path, if it may be written: new, empty, or a quantized target of ours."""
    out = out.expanduser().resolve()
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: give a folder")
    if out == source.resolve():
        raise UserError("the output is the folder of the target: give another one")
    if out.exists() and any(out.iterdir()) and not is_quantized_target(out):
        raise UserError(f"{out} has other files: give a new or an empty folder")
    return out


def is_quantized_target(folder: Path) -> bool:
    readme = folder / "README.md"
    is_ours = readme.is_file() and readme.read_text().startswith(TITLE)
    return is_ours and (read_quantization(folder) is not None or has_mxfp4(folder))
