"""`peagle quantize --format mxfp4`: write a GPT-OSS with MXFP4 experts, as published ones are.

Only the matrices of experts are rounded. Each file of the source becomes a file of the same name,
one after another, so that only one of them is in memory.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.errors import UserError
from peagle.kernels.expert_matrices import MXFP4_BLOCK, decode_mxfp4
from peagle.paths import publish_folder, save_tensors, write_json
from peagle.progress import Progress, silent
from peagle.target.experts.mxfp4_codes import quantize_mxfp4
from peagle.target.experts.mxfp4_layout import (
    MXFP4,
    PROJECTIONS,
    ExpertSizes,
    expert_sizes,
    expert_tensors,
    find_experts,
    quantization_config,
)
from peagle.target.quantized.card import card_text
from peagle.target.quantized.shards import INDEX, read_shard, shard_paths
from peagle.target.quantized.write import (
    NOT_COPIED,
    WEIGHT_SUFFIXES,
    QuantizationReport,
    build_without_weights,
    check_out_folder,
)


def write_mxfp4(source: Path, out: Path, progress: Progress = silent) -> QuantizationReport:
    """Write `out` atomically: it appears complete or not at all."""
    out = check_out_folder(out, source)
    projections = find_projections(build_without_weights(source))
    report = QuantizationReport(MXFP4, MXFP4_BLOCK)
    with publish_folder(out) as staging:
        for file in source.iterdir():
            copied = file.name not in NOT_COPIED and file.suffix not in WEIGHT_SUFFIXES
            if file.is_file() and copied:
                shutil.copyfile(file, staging / file.name)
        weight_map = write_shards(source, staging, projections, report, progress)
        if (source / INDEX).is_file():
            index = {"metadata": {"total_size": report.bytes_after}, "weight_map": weight_map}
            write_json(staging / INDEX, index)
        config = json.loads((source / "config.json").read_text())
        write_json(staging / "config.json", config | {"quantization_config": quantization_config()})
        (staging / "README.md").write_text(mxfp4_card(source, config, report))
    return report


def find_projections(model: Any) -> dict[str, ExpertSizes]:
    """The tensors to round: `model.layers.0.mlp.experts.gate_up_proj` and so on."""
    modules = find_experts(model)
    if not modules:
        raise UserError(
            f"mxfp4 is for the experts of GPT-OSS, and this is a {model.config.model_type} model:"
            " use fp8 or int8"
        )
    return {
        f"{name}.{projection}": expert_sizes(module)
        for name, module in modules.items()
        for projection in PROJECTIONS
    }


def write_shards(
    source: Path,
    staging: Path,
    projections: dict[str, ExpertSizes],
    report: QuantizationReport,
    progress: Progress,
) -> dict[str, str]:
    """Quantize all files; return tensor name -> file name."""
    paths = shard_paths(source)
    weight_map: dict[str, str] = {}
    missing = set(projections)
    total = sum(path.stat().st_size for path in paths)
    for path in paths:
        tensors: dict[str, Tensor] = {}
        for name, tensor in read_shard(path).items():
            if name in projections:
                tensors |= quantize_projection(name, tensor, projections[name], report)
                missing.discard(name)
            else:
                tensors[name] = tensor
            report.bytes_before += tensor.nbytes
            progress("rounding to mxfp4", min(report.bytes_before, total), total)
        save_tensors(tensors, staging / path.name)
        weight_map |= dict.fromkeys(tensors, path.name)
        report.bytes_after += sum(tensor.nbytes for tensor in tensors.values())
    progress("rounding to mxfp4", total, total)
    if missing:
        raise UserError(f"the target in {source} lacks {min(missing)}: copy it again")
    return weight_map


def quantize_projection(
    name: str, tensor: Tensor, sizes: ExpertSizes, report: QuantizationReport
) -> dict[str, Tensor]:
    """tensor [E, K, N], as transformers stores GPT-OSS; one expert after another is rounded."""
    module, _, projection = name.rpartition(".")
    outputs, inputs = sizes.matrix(projection)
    if tensor.shape != (sizes.num_experts, inputs, outputs):
        raise UserError(
            f"tensor {name} has shape {list(tensor.shape)}, but the config needs"
            f" {[sizes.num_experts, inputs, outputs]}: copy the target again"
        )
    parts: list[tuple[Tensor, Tensor]] = []
    for expert, matrix in enumerate(tensor):
        weight = matrix.T.float()  # [N, K]
        if not weight.isfinite().all():
            raise UserError(f"{name} is not finite: such a target cannot be quantized")
        parts.append(quantize_mxfp4(weight))
        report.add(f"{name}[{expert}]", weight, decode_mxfp4(*parts[-1], torch.float32))
    codes, scales = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    return expert_tensors(module, projection, codes, scales)


def mxfp4_card(source: Path, config: dict[str, Any], report: QuantizationReport) -> str:
    description = (
        f"Experts in floats of 4 bits, with one exponent per {report.group} inputs of an output."
        " Rounded to the nearest; each exponent is the one of two with the least squared error. No"
        " data was used. Everything else is unchanged."
    )
    layout = "mxfp4, as GPT-OSS is published"
    return card_text(source, config, report, description, layout, f"{len(report.errors)}")
