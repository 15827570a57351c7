"""`peagle quantize`: from a target's folder to one in fewer bits that vLLM serves as it is.

The matrices of the linear layers become codes; embeddings, lm_head, norms and biases stay. A file of the source becomes
a file of the same name, one after another: no more than one of them is in memory.
"""

import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from peagle.errors import UserError
from peagle.paths import publish_folder, save_tensors, write_json
from peagle.progress import Progress, silent
from peagle.target.quantized.card import TITLE, card
from peagle.target.quantized.codes import quantize_matrix
from peagle.target.quantized.formats import WeightFormat, quantization_config
from peagle.target.quantized.layout import WEIGHT, weight_tensors
from peagle.target.quantized.read import read_quantization
from peagle.target.quantized.shards import INDEX, read_shard, shards

OURS = ("README.md", "peagle.json")  # a card and a receipt are of their own folder
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")


@dataclass(slots=True)
class Written:
    """What became of a target. Errors are shares of a matrix' own length: |codes * scales - W| / |W|."""

    format: str
    group: int | None
    bytes_before: int = 0
    bytes_after: int = 0
    errors: dict[str, float] = field(default_factory=dict)  # by matrix
    squares: list[float] = field(
        default_factory=lambda: [0.0, 0.0]
    )  # of all differences, of all weights

    @property
    def error(self) -> float:
        return math.sqrt(self.squares[0] / self.squares[1]) if self.squares[1] else 0.0

    @property
    def worst(self) -> str:
        return max(self.errors, key=self.errors.__getitem__)

    def add(self, name: str, before: Tensor, after: Tensor) -> None:
        apart, length = float((after - before).square().sum()), float(before.square().sum())
        self.errors[name] = math.sqrt(apart / length) if length else 0.0
        self.squares = [self.squares[0] + apart, self.squares[1] + length]

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "group": self.group,
            "matrices": len(self.errors),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "error": round(self.error, 6),
            "worst": self.worst,
            "worst_error": round(self.errors[self.worst], 6),
        }


def quantize(
    source: Path, out: Path, to: WeightFormat, progress: Progress = silent, group: int | None = None
) -> Written:
    """Writes `out` whole or not at all. `group`: inputs that share a scale in int4; None: as many as can be."""
    out = out_folder(out, source)
    matrices, ignored = linear_layers(source)
    written = Written(to.name, to.group_of(matrices.values(), group))
    with publish_folder(out) as staging:
        for file in source.iterdir():
            if file.is_file() and file.name not in (*OURS, INDEX) and file.suffix not in WEIGHTS:
                shutil.copyfile(file, staging / file.name)
        places = write_shards(source, staging, matrices, to, written, progress)
        if (source / INDEX).is_file():
            write_json(
                staging / INDEX,
                {"metadata": {"total_size": written.bytes_after}, "weight_map": places},
            )
        config = json.loads((source / "config.json").read_text())
        write_json(
            staging / "config.json",
            config | {"quantization_config": quantization_config(to, written.group, ignored)},
        )
        (staging / "README.md").write_text(card(source, config, written))
    return written


def write_shards(
    source: Path,
    staging: Path,
    matrices: dict[str, int],
    to: WeightFormat,
    written: Written,
    progress: Progress,
) -> dict[str, str]:
    """Tensor name -> file name."""
    files, left, places = shards(source), set(matrices), dict[str, str]()
    what, total, done = f"rounding to {to.name}", sum(file.stat().st_size for file in files), 0
    for file in files:
        small: dict[str, Tensor] = {}
        for name, tensor in read_shard(file).items():
            module = name.removesuffix(WEIGHT)
            if name.endswith(WEIGHT) and module in matrices:
                small |= in_codes(module, tensor, to, written)
                left.discard(module)
            else:
                small[name] = tensor
            written.bytes_before += tensor.nbytes
            progress(what, min(done := done + tensor.nbytes, total), total)
        save_tensors(small, staging / file.name)
        places |= dict.fromkeys(small, file.name)
        written.bytes_after += sum(tensor.nbytes for tensor in small.values())
    progress(what, total, total)
    if left:
        raise UserError(f"the target in {source} lacks {min(left)}{WEIGHT}: copy it again")
    return places


def in_codes(module: str, tensor: Tensor, to: WeightFormat, written: Written) -> dict[str, Tensor]:
    if not tensor.isfinite().all():
        raise UserError(f"{module}{WEIGHT} is not finite: such a target cannot be quantized")
    codes = quantize_matrix(tensor, to, written.group)
    written.add(module, tensor.float(), codes.matrix(torch.float32))
    return weight_tensors(module, codes, to)


def linear_layers(source: Path) -> tuple[dict[str, int], list[str]]:
    """The layers to quantize with their inputs, and the linear layers that stay."""
    model = skeleton(source)
    head = model.get_output_embeddings()
    names = {
        module: name for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    inside = set(model.get_decoder().modules())
    known = {id(module.weight) for module in names} | {id(model.get_input_embeddings().weight)}
    if strange := [n for n, p in model.named_parameters() if p.ndim > 1 and id(p) not in known]:
        raise UserError(
            f"{strange[0]} is no matrix of a linear layer (as of experts): only dense targets are quantized"
        )
    chosen = {
        name: module.in_features
        for module, name in names.items()
        if module in inside and module is not head
    }
    return chosen, [name for module, name in names.items() if name not in chosen]


def skeleton(source: Path) -> Any:
    """The model without its weights."""
    if not (source / "config.json").is_file():
        raise UserError(
            f"no target in {source}: config.json is missing. Give a folder that `peagle pull` made"
        )
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers raises whatever the file brings up
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"cannot understand the target in {source}: {reason}") from error
    if getattr(config, "quantization_config", None):
        raise UserError(f"the target in {source} is quantized already: give the one it was made of")
    return model


def out_folder(out: Path, source: Path) -> Path:
    """The absolute path, if it may be written: new, empty, or a quantized target of ours."""
    out = out.expanduser().resolve()
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: give a folder")
    if out == source.resolve():
        raise UserError("--out is the target's own folder: give another one")
    if out.exists() and any(out.iterdir()) and not is_ours(out):
        raise UserError(f"{out} holds something else: give a new or an empty folder")
    return out


def is_ours(folder: Path) -> bool:
    told = folder / "README.md"
    return (
        read_quantization(folder) is not None
        and told.is_file()
        and told.read_text().startswith(TITLE)
    )
