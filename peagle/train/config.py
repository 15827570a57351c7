"""What a training run is: one flat config, read from YAML or TOML, every default visible."""

import math
import tomllib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from peagle.core import Method
from peagle.errors import UserError, did_you_mean


def doc(default: Any, text: str) -> Any:
    return field(default=default, metadata={"doc": text})


LOSSES = ("kl", "ce", "mix", "tv", "tvmix", "length")
NOT_NEGATIVE = (
    "draft_vocab",
    "max_anchors",
    "held_out",
    "steps",
    "seed",
    "clip",
    "final_lr",
    "weight_decay",
)
RUNGS = ("inject", "bidirectional", "dependency", "confidence", "freeze")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    target: str = doc("smollm2-135m", "a pair's name, a folder or a hub id")
    data: str = doc(
        "",
        "folders of `peagle regenerate` or JSONL files of conversations, with commas; or a capture",
    )
    out: str = doc("run", "where the run lives: checkpoints, curves, the drafter")
    method: Method = doc("p-eagle", "p-eagle, or eagle3 (training-time test)")
    layers: int = doc(0, "decoder layers of the drafter; 0: 4 for p-eagle, 1 for eagle3")
    k: int = doc(10, "depths trained: row k drafts token k + 1")
    aux_layer_ids: tuple[int, ...] = doc((), "taps; empty: (2, L // 2, L - 3)")
    mask_token_id: int = doc(
        -1, "an unused vocabulary row for p-eagle; -1: the pair's, or the last row"
    )
    draft_vocab: int = doc(0, "the most frequent tokens of the answers; 0: the whole vocabulary")
    norm_before_fc: bool = doc(False, "a norm over all taps before fc")
    fc_norm: bool = doc(False, "a norm of each tap before fc")
    train_embeddings: bool = doc(
        False, "train the embedding table too; it is then stored with the drafter"
    )
    init: str = doc(
        "target",
        "target: blocks start as the target's last ones; random; or the folder of a drafter to go on from",
    )
    # what a plain drafter has not (p-eagle only)
    inject: bool = doc(False, "the fused taps enter every layer, not the first alone")
    bidirectional: bool = doc(False, "mask rows of a block see each other, later ones too")
    dependency: int = doc(0, "rank of the correction of a row by the draft before it; 0: none")
    dependency_drop: float = doc(
        0.3, "share of the rows that are not corrected, so that plain logits stay good"
    )
    confidence: bool = doc(False, "an output that predicts whether a row's draft is accepted")
    freeze: bool = doc(False, "train only dependency and confidence, of the drafter named by init")
    # what is seen
    max_length: int = doc(2048, "longer documents are cut")
    pack_tokens: int = doc(4096, "documents are packed into rows of so many tokens")
    packs_per_step: int = doc(1, "packs of one optimizer step, over all processes")
    keep: float = doc(0.8, "COD: depth k keeps this to the k-th of the rows")
    max_anchors: int = doc(0, "at most so many random anchors of a pack get chains; 0: all")
    segments: int = doc(
        1, "chains of a pack run in so many segments: less memory, the same gradients"
    )
    held_out: int = doc(200, "prompts kept for evaluation (a fifth at most)")
    # what is minimized, and how
    loss: str = doc(
        "mix", "kl (to the target's distribution), ce (its likeliest token), mix; tv, tvmix; length"
    )
    mix: float = doc(
        0.5,
        "share of kl in mix, of tv in tvmix, of the acceptance length in length; ce is the rest",
    )
    depth_weight: float = doc(1.0, "the loss of depth k counts this to the k-th")
    optimizer: str = doc("muon", "muon (for matrices, adamw for the rest), or adamw")
    lr: float = doc(3e-3, "peak learning rate; with adamw use about 1e-3")
    schedule: str = doc("cosine", "cosine, linear, or constant, after the warm-up")
    warmup: float = doc(0.01, "share of the steps")
    final_lr: float = doc(0.02, "the last learning rate, as a share of the peak")
    weight_decay: float = doc(0.0, "")
    beta1: float = doc(0.9, "")
    beta2: float = doc(0.95, "")
    clip: float = doc(1.0, "largest norm of the gradient; 0: no limit")
    epochs: float = doc(4.0, "passes over the data")
    steps: int = doc(0, "optimizer steps; 0: as many as the epochs take")
    seed: int = doc(0, "of the data's order, the chains and the first weights")
    # how it runs
    dtype: str = doc(
        "auto", "auto (bfloat16 on a GPU), bfloat16 or float32; weights and optimizer stay float32"
    )
    device: str = doc("auto", "auto, cpu or cuda")
    remember: bool = doc(
        True, "keep the target's features on the GPU after the first epoch, if they fit"
    )
    compile: bool = doc(True, "torch.compile on a GPU")
    checkpointing: bool = doc(False, "run blocks twice instead of keeping their activations")
    parallel: str = doc(
        "ddp", "under torchrun: ddp, or fsdp (with adamw; no acceptance length while training)"
    )
    log_every: int = doc(20, "steps")
    save_every: int = doc(500, "steps")
    eval_every: int = doc(500, "steps; 0: at the end only")
    eval_k: int = doc(7, "K of the acceptance length shown while training")

    def __post_init__(self) -> None:
        rules = {
            "method": (self.method in ("p-eagle", "eagle3"), "p-eagle or eagle3"),
            **{
                name: (1 <= getattr(self, name) <= 64, "in 1..64") for name in ("k", "eval_k")
            },  # rule.py: MOST_DEPTHS
            "layers": (self.layers >= 0, "1 or more, or 0 for the default"),
            "keep": (0 < self.keep <= 1, "in (0, 1]"),
            "loss": (self.loss in LOSSES, "one of " + ", ".join(LOSSES)),
            "dependency": (0 <= self.dependency <= 256, "in 0..256"),
            "dependency_drop": (0 <= self.dependency_drop <= 1, "in [0, 1]"),
            "mix": (0 <= self.mix <= 1, "in [0, 1]"),
            "optimizer": (self.optimizer in ("adamw", "muon"), "adamw or muon"),
            "schedule": (
                self.schedule in ("cosine", "linear", "constant"),
                "cosine, linear or constant",
            ),
            **{name: (0 <= getattr(self, name) < 1, "in [0, 1)") for name in ("beta1", "beta2")},
            "warmup": (0 <= self.warmup < 1, "in [0, 1)"),
            "dtype": (self.dtype in ("auto", "bfloat16", "float32"), "auto, bfloat16 or float32"),
            "parallel": (self.parallel in ("ddp", "fsdp"), "ddp or fsdp"),
            "max_length": (self.max_length >= 3, "3 or more"),
            "pack_tokens": (self.pack_tokens >= 128, "128 or more"),
            **{
                name: (getattr(self, name) >= 1, "1 or more")
                for name in ("packs_per_step", "segments", "log_every")
            },
            **{
                name: (0 < getattr(self, name) < math.inf, "above 0")
                for name in ("lr", "epochs", "depth_weight")
            },
            **{name: (getattr(self, name) >= 0, "0 or more") for name in NOT_NEGATIVE},
        }
        for name, (holds, wanted) in rules.items():
            if not holds:
                raise UserError(f"{name} is {getattr(self, name)!r}: it must be {wanted}")
        if self.method == "eagle3" and (odd := [name for name in RUNGS if getattr(self, name)]):
            raise UserError(
                f"{odd[0]} is of p-eagle drafters: leave it out, or use method = 'p-eagle'"
            )
        if self.freeze and (
            not (self.dependency or self.confidence) or self.init in ("target", "random")
        ):
            raise UserError(
                "freeze trains a dependency or a confidence output of a finished drafter:"
                " set one of the two, and init to that drafter's folder"
            )
        if self.freeze and self.train_embeddings:
            raise UserError("freeze leaves the embeddings as they are: leave out train_embeddings")
        if self.optimizer == "muon" and self.parallel == "fsdp":
            raise UserError(
                "muon needs whole matrices, which fsdp splits: use parallel = 'ddp' or optimizer = 'adamw'"
            )

    @property
    def num_layers(self) -> int:
        return self.layers or (4 if self.method == "p-eagle" else 1)


def read_config(path: Path | None, overrides: dict[str, Any] | None = None) -> TrainConfig:
    """A YAML or TOML file, then `overrides` (from the command line)."""
    given: Any = _read(Path(path).expanduser()) if path else {}
    if not isinstance(given, dict):
        raise UserError(f"{path} must hold keys and values: see `peagle train --print-config`")
    known = {f.name: f for f in fields(TrainConfig)}
    values = {}
    for key, value in (given | (overrides or {})).items():
        if key not in known:
            raise UserError(
                f"unknown key {key!r} in {path or 'the options'}.{did_you_mean(str(key), list(known))}"
            )
        values[key] = _typed(key, value, known[key].default)
    return TrainConfig(**values)


def _read(path: Path) -> Any:
    try:
        text = path.read_text()
        return tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text) or {}
    except FileNotFoundError as error:
        raise UserError(
            f"no config {path}: write one with `peagle train --print-config > {path}`"
        ) from error
    except (OSError, tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def _typed(key: str, value: Any, default: Any) -> Any:
    """The value as the type of its default; text is understood as `--set key=value` gives it."""
    kind = type(default)
    try:
        if kind is bool and isinstance(value, str):
            return {"true": True, "false": False}[value.lower()]
        if kind is tuple:
            parts = value.split(",") if isinstance(value, str) else value
            return tuple(int(str(part)) for part in parts if str(part).strip())
        if (kind is bool) != isinstance(value, bool) or (
            kind is str and not isinstance(value, str | int | float)
        ):
            raise ValueError
        if kind is int and float(value) != int(float(value)):
            raise ValueError
        return kind(float(value)) if kind is int else kind(value)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise UserError(
            f"{key} is {value!r}: it must be {kind.__name__}, such as {default!r}"
        ) from error


def as_yaml(config: TrainConfig) -> str:
    """Every key with its value and what it means."""
    lines = []
    for f in fields(config):
        value = asdict(config)[f.name]
        shown = yaml.safe_dump(
            list(value) if isinstance(value, tuple) else value, default_flow_style=True
        )
        shown = shown.replace("\n...", "").strip()
        about = f.metadata.get("doc", "")
        lines.append(f"{f.name}: {shown}" + (f"  # {about}" if about else ""))
    return "\n".join(lines) + "\n"
