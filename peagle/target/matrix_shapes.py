"""MatrixShapes: the weight matrices of a target, as its config describes them.

Those of experts are counted by themselves (expert_shapes.py): a pass reads some of them.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.target.expert_shapes import ExpertShapes, Shape, config_experts


@dataclass(frozen=True, slots=True)
class MatrixShapes:
    hidden_size: int
    intermediate_size: int
    query_size: int  # heads * head_dim
    kv_size: int  # key and value heads * head_dim, of keys alone
    num_layers: int
    vocab_size: int
    experts: ExpertShapes | None = None  # in place of the MLPs

    @property
    def layer(self) -> tuple[Shape, ...]:
        """The matrices of a layer, with projections of the same input side by side.

        A layer with experts has a router in place of the MLP.
        """
        d = self.hidden_size
        attention = ((self.query_size + 2 * self.kv_size, d), (d, self.query_size))
        if self.experts is not None:
            return (*attention, (self.experts.num_experts, d))
        return (*attention, (2 * self.intermediate_size, d), (d, self.intermediate_size))

    @property
    def weights(self) -> int:
        """The number of weights without experts. A pass reads all of them."""
        layer = sum(n * k for n, k in self.layer)
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    @property
    def name(self) -> str:
        """For the key of a measurement: `30 x (576, 1536, 576 + 2 * 192), 49152`."""
        width = self.intermediate_size if self.experts is None else self.experts.name
        return (
            f"{self.num_layers} x ({self.hidden_size}, {width},"
            f" {self.query_size} + 2 * {self.kv_size}), {self.vocab_size}"
        )

    def share_read(self, rows: int) -> float:
        """The share of `weights` that a pass of `rows` rows reads."""
        return 1.0

    def matrix_rows(self, rows: int) -> int:
        """The rows of a matrix in a pass of `rows` rows."""
        return rows

    def sample(self, weights: float) -> list[Shape]:
        """Matrices with about `weights` weights in all, in the proportions of the target.

        Whole layers and part of lm_head; where one layer is larger, part of its outputs.
        """
        share = min(1.0, weights / self.weights)
        layers = max(1, round(share * self.num_layers))
        cut = min(1.0, share * self.num_layers)
        layer = [(max(1, round(cut * n)), k) for n, k in self.layer]
        return [*(layer * layers), (max(1, round(share * self.vocab_size)), self.hidden_size)]


# Of SmolLM2-135M, for a target whose shapes are not known.
DEFAULT_SHAPES = MatrixShapes(576, 1536, 576, 192, 30, 49152)


def read_shapes(path: Path) -> MatrixShapes | None:
    """The shapes of the target in a folder or GGUF file; None if its config does not tell."""
    folder = path
    if path.is_file():
        from peagle.target.gguf.config_folder import config_folder
        from peagle.target.gguf.header import read_header

        folder = config_folder(read_header(path))
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return config_shapes(json.loads((folder / "config.json").read_text()))
    return None


def config_shapes(config: Mapping[str, Any]) -> MatrixShapes:
    """Raises an error if the config is not that of a Llama-like target."""
    config = config.get("text_config") or config
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    experts = config_experts(config)
    width = config["intermediate_size"] if experts is None else experts.intermediate_size
    shapes = MatrixShapes(
        int(config["hidden_size"]),
        int(width),
        heads * head_dim,
        kv_heads * head_dim,
        int(config["num_hidden_layers"]),
        int(config["vocab_size"]),
        experts,
    )
    if min(shapes.hidden_size, shapes.intermediate_size, shapes.num_layers, shapes.kv_size) < 1:
        raise ValueError(f"sizes must be positive: {shapes}")
    return shapes
