"""The config of a training run: flat, read from YAML or TOML, with visible defaults."""

import math
import tomllib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from peagle.core import Method
from peagle.draft_shape import MIN_WINDOW
from peagle.drafter.config import MAX_REFINEMENT
from peagle.errors import UserError, did_you_mean
from peagle.train.data.chains import MAX_DEPTHS


def doc(default: Any, text: str) -> Any:
    """A field with its description in `peagle train --print-config`."""
    return field(default=default, metadata={"doc": text})


LOSSES = ("kl", "ce", "mix", "tv", "tvmix", "lk", "length", "dpace", "tree")
DEFAULT_EVAL_K = 7
SEE_KEYS = " See `peagle train --print-config`."
SCHEDULES = ("cosine", "linear", "constant")
# Keys of what a plain drafter does not have; only p-eagle drafters do.
P_EAGLE_KEYS = (
    "inject",
    "bidirectional",
    "convolution",
    "refinement",
    "dependency",
    "confidence",
    "freeze",
)
NON_NEGATIVE_KEYS = (
    "intermediate_size",
    "context",
    "max_anchors",
    "held_out",
    "steps",
    "minutes",
    "seed",
    "clip",
    "final_lr",
    "weight_decay",
)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    target: str = doc("smollm2-135m", "name of a pair, a folder or a hub id")
    data: str = doc(
        "",
        "folders of `peagle regenerate` or JSONL files of conversations, separated by commas;"
        " or a capture",
    )
    out: str = doc("run", "folder of the run: states, log, curves, the drafter")
    method: Method = doc("p-eagle", "p-eagle, or eagle3 (training-time test)")
    layers: int = doc(0, "decoder layers of the drafter; 0: 4 for p-eagle, 1 for eagle3")
    k: int = doc(10, "number of trained depths: the row of depth k drafts token k + 1")
    intermediate_size: int = doc(0, "width of the drafter's MLP; 0: the target's")
    aux_layer_ids: tuple[int, ...] = doc((), "tapped layers; empty: (2, L // 2, L - 3)")
    mask_token_id: int = doc(
        -1, "an unused vocabulary row for p-eagle; -1: the pair's, or the last row"
    )
    draft_vocab: int = doc(
        0,
        "size of the draft vocabulary, the most frequent tokens of the answers; 0: all tokens;"
        " -1: that of the drafter in init",
    )
    norm_before_fc: bool = doc(False, "one norm over all taps before fc")
    fc_norm: bool = doc(False, "a norm for each tap before fc")
    norm_output: bool = doc(False, "eagle3 feeds its normed output back, as EAGLE-3.1 does")
    train_embeddings: bool = doc(
        False, "train the embedding table too; it is then stored with the drafter"
    )
    init: str = doc(
        "target",
        "target (copy the target's last blocks), random, or the folder of a drafter to continue",
    )
    sliding_window: int = doc(
        0,
        "positions that a row of the drafter attends to, its own included; 0: as the drafter in"
        " init, else all; -1: all",
    )
    # Extensions of the plain drafter (p-eagle only).
    inject: bool = doc(False, "add the fused taps to the input of every layer, not only the first")
    bidirectional: bool = doc(False, "mask rows of a block see all rows of the block")
    convolution: bool = doc(False, "mask rows add the state of the row before them, behind a gate")
    refinement: int = doc(
        0, "passes over a block in which its rows know the drafts before them, 1 or 2; 0: none"
    )
    dependency: int = doc(
        0, "rank of the dependency head, which corrects a row by the draft before it; 0: none"
    )
    dependency_drop: float = doc(
        0.3, "fraction of the rows that are not corrected, so that plain logits stay good"
    )
    confidence: bool = doc(False, "an output that predicts whether the draft of a row is accepted")
    freeze: bool = doc(
        False, "train only refinement, dependency and confidence, on top of the drafter in init"
    )
    context: int = doc(
        0, "tokens of the longest request to serve, for RoPE that depends on it; 0: the target's"
    )
    # Data.
    max_length: int = doc(2048, "tokens of a document; longer documents are cut")
    pack_tokens: int = doc(4096, "tokens of a pack, into which documents are packed")
    packs_per_step: int = doc(1, "packs of one optimizer step, over all processes")
    keep: float = doc(0.8, "COD rate r: depth k keeps about r^k of the rows")
    max_anchors: int = doc(0, "limit on the anchors of a pack that get chains, at random; 0: all")
    segments: int = doc(
        1, "segments in which the chains of a pack run: less memory, the same gradients"
    )
    joined: float = doc(
        0.0,
        "fraction of the documents that are joined, one behind the other, to documents of up to"
        " max_length tokens: long contexts without longer answers",
    )
    held_out: int = doc(200, "prompts held out for evaluation, at most a fifth")
    # Objective and optimizer.
    loss: str = doc(
        "mix",
        "kl (to the target's distribution), ce (its most likely token), mix, tv (total variation),"
        " tvmix, lk (kl where drafts are refused, tv where they are accepted), length, dpace, tree",
    )
    mix: float = doc(
        0.5,
        "fraction of kl in mix, of tv in tvmix, of lk, of the acceptance length in length and tree;"
        " the rest is ce; the smoothing of dpace",
    )
    depth_weight: float = doc(1.0, "w: the loss of depth k has the weight w^k")
    on_policy: float = doc(
        0.0,
        "s: anchors where decoding with the current drafter would not start a step have the weight"
        " 1 - s; 0: all anchors have the same weight",
    )
    optimizer: str = doc("muon", "muon (for matrices, adamw for the rest), or adamw")
    lr: float = doc(3e-3, "peak learning rate; with adamw use about 1e-3")
    schedule: str = doc("cosine", "cosine, linear, or constant, after the warm-up")
    warmup: float = doc(0.01, "fraction of the steps")
    final_lr: float = doc(0.02, "last learning rate, as a fraction of the peak")
    weight_decay: float = doc(0.0, "")
    beta1: float = doc(0.9, "")
    beta2: float = doc(0.95, "")
    clip: float = doc(1.0, "largest norm of the gradient; 0: no limit")
    epochs: float = doc(4.0, "passes over the data")
    steps: int = doc(0, "optimizer steps; 0: as many as the epochs need")
    minutes: float = doc(
        0.0,
        "the run ends after so many minutes, its learning rate with it, even if steps are left;"
        " compilation (the first step) is not counted; 0: no limit",
    )
    seed: int = doc(0, "seed of the data order, the chains and the initial weights")
    bits: int = doc(8, "bits of the published matrices, 8 or 4; more where they cost more than 1 %")
    rounded: float = doc(
        0.0,
        "last part of the training, as a fraction, in which passes use weights rounded to 4 bits",
    )
    # Execution.
    dtype: str = doc(
        "auto", "auto (bfloat16 on a GPU), bfloat16 or float32; weights and optimizer stay float32"
    )
    device: str = doc("auto", "auto, cpu or cuda")
    remember: bool = doc(
        True, "cache the target's features on the GPU after the first epoch, if they fit"
    )
    compile: bool = doc(True, "torch.compile on a GPU")
    checkpointing: bool = doc(False, "recompute activations in the backward pass to save memory")
    parallel: str = doc(
        "ddp", "under torchrun: ddp, or fsdp (with adamw; no acceptance length while training)"
    )
    log_every: int = doc(20, "steps")
    save_every: int = doc(500, "steps")
    eval_every: int = doc(500, "steps; 0: at the end only")
    eval_k: int = doc(
        0, f"K of the acceptance length that is logged; 0: {DEFAULT_EVAL_K}, or k if k is less"
    )

    def __post_init__(self) -> None:
        for name, (valid, expected) in self._rules().items():
            if not valid:
                raise UserError(f"{name} is {getattr(self, name)!r}: it must be {expected}")
        self._check_combinations()

    def _rules(self) -> dict[str, tuple[bool, str]]:
        """Whether the value of each key is valid, and what is expected."""
        count_keys = ("packs_per_step", "segments", "log_every")
        positive_keys = ("lr", "epochs", "depth_weight")
        return {
            "method": (self.method in ("p-eagle", "eagle3"), "p-eagle or eagle3"),
            "k": (1 <= self.k <= MAX_DEPTHS, f"in 1..{MAX_DEPTHS}"),
            "eval_k": (
                0 <= self.eval_k <= MAX_DEPTHS,
                f"in 1..{MAX_DEPTHS}, or 0 for the default",
            ),
            "layers": (self.layers >= 0, "1 or more, or 0 for the default"),
            "sliding_window": (
                self.sliding_window in (0, -1) or self.sliding_window >= MIN_WINDOW,
                f"{MIN_WINDOW} or more, 0 for that of the drafter in init, or -1 for none",
            ),
            "draft_vocab": (
                self.draft_vocab >= (-1 if self.continues else 0),
                "0 or more, or, if init is the folder of a drafter, -1 for its own",
            ),
            "keep": (0 < self.keep <= 1, "in (0, 1]"),
            "loss": (self.loss in LOSSES, "one of " + ", ".join(LOSSES)),
            "refinement": (0 <= self.refinement <= MAX_REFINEMENT, f"in 0..{MAX_REFINEMENT}"),
            "dependency": (0 <= self.dependency <= 256, "in 0..256"),
            "joined": (0 <= self.joined <= 1, "in [0, 1]"),
            "dependency_drop": (0 <= self.dependency_drop <= 1, "in [0, 1]"),
            "mix": (0 <= self.mix <= 1, "in [0, 1]"),
            "on_policy": (0 <= self.on_policy < 1, "in [0, 1)"),
            "optimizer": (self.optimizer in ("adamw", "muon"), "adamw or muon"),
            "schedule": (self.schedule in SCHEDULES, "cosine, linear or constant"),
            **{name: (0 <= getattr(self, name) < 1, "in [0, 1)") for name in ("beta1", "beta2")},
            "bits": (self.bits in (4, 8), "4 or 8"),
            "rounded": (0 <= self.rounded <= 1, "in [0, 1]"),
            "warmup": (0 <= self.warmup < 1, "in [0, 1)"),
            "dtype": (self.dtype in ("auto", "bfloat16", "float32"), "auto, bfloat16 or float32"),
            "parallel": (self.parallel in ("ddp", "fsdp"), "ddp or fsdp"),
            "max_length": (self.max_length >= 3, "3 or more"),
            "pack_tokens": (self.pack_tokens >= 128, "128 or more"),
            **{name: (getattr(self, name) >= 1, "1 or more") for name in count_keys},
            **{name: (0 < getattr(self, name) < math.inf, "above 0") for name in positive_keys},
            **{name: (getattr(self, name) >= 0, "0 or more") for name in NON_NEGATIVE_KEYS},
        }

    def _check_combinations(self) -> None:
        if self.method == "eagle3":
            for name in P_EAGLE_KEYS:
                if getattr(self, name):
                    raise UserError(
                        f"{name} needs a p-eagle drafter: leave it out, or use method = 'p-eagle'"
                    )
        elif self.norm_output:
            raise UserError(
                "norm_output needs an eagle3 drafter: leave it out, or use method = 'eagle3'"
            )
        if self.freeze:
            has_head = self.refinement or self.dependency or self.confidence
            if not has_head or not self.continues:
                raise UserError(
                    "freeze trains a refinement, a dependency or a confidence output of a finished"
                    " drafter: set one of them, and init to that drafter's folder"
                )
            if self.train_embeddings:
                raise UserError("freeze keeps the embeddings unchanged: leave out train_embeddings")
        if self.rounded and self.bits != 4:
            raise UserError("rounded trains for matrices of 4 bits: set bits = 4")
        if self.rounded and self.parallel == "fsdp":
            raise UserError("rounded needs whole matrices, which fsdp splits: use parallel = 'ddp'")
        if self.optimizer == "muon" and self.parallel == "fsdp":
            raise UserError(
                "muon needs whole matrices, which fsdp splits:"
                " use parallel = 'ddp' or optimizer = 'adamw'"
            )

    @property
    def continues(self) -> bool:
        """Whether init is the folder of a drafter."""
        return self.init not in ("target", "random")

    @property
    def num_layers(self) -> int:
        return self.layers or (4 if self.method == "p-eagle" else 1)

    @property
    def logged_k(self) -> int:
        """K of the acceptance length that is logged: by default, no deeper than the training."""
        return self.eval_k or min(DEFAULT_EVAL_K, self.k)

    @property
    def window(self) -> int | None:
        """The sliding window of the drafter; None: it attends to all positions."""
        return self.sliding_window if self.sliding_window > 0 else None


def read_config(path: Path | None, overrides: dict[str, Any] | None = None) -> TrainConfig:
    """Read a YAML or TOML file; `overrides` (from the command line) replace its values."""
    values: Any = _read_file(Path(path).expanduser()) if path else {}
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold keys and values: see `peagle train --print-config`")
    known = {f.name: f for f in fields(TrainConfig)}
    typed = {}
    for key, value in (values | (overrides or {})).items():
        if key not in known:
            hint = did_you_mean(str(key), list(known)) or SEE_KEYS
            raise UserError(f"unknown key {key!r} in {path or 'the options'}.{hint}")
        typed[key] = _convert(key, value, known[key].default)
    return TrainConfig(**typed)


def _read_file(path: Path) -> Any:
    try:
        text = path.read_text()
        return tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text) or {}
    except FileNotFoundError as error:
        raise UserError(
            f"there is no config {path}: write one with `peagle train --print-config > {path}`"
        ) from error
    except (OSError, tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def _convert(key: str, value: Any, default: Any) -> Any:
    """Convert a value to the type of its default; text may come from `--set key=value`."""
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


def to_yaml(config: TrainConfig) -> str:
    """Every key with its value and its description."""
    values = asdict(config)
    lines = []
    for f in fields(config):
        value = values[f.name]
        text = yaml.safe_dump(
            list(value) if isinstance(value, tuple) else value, default_flow_style=True
        )
        text = text.replace("\n...", "").strip()
        description = f.metadata.get("doc", "")
        lines.append(f"{f.name}: {text}" + (f"  # {description}" if description else ""))
    return "\n".join(lines) + "\n"
