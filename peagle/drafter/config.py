"""The configuration of a drafter: sizes, switches, and the target it belongs to."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from peagle.core import Method
from peagle.draft_shape import check_window
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.target import Target

MAX_REFINEMENT = 2  # passes over a block
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Every field is a key of config.json in our own checkpoint format."""

    method: Method
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    # Layers whose input is tapped. None: the checkpoint has none, and the target's default applies.
    aux_layer_ids: tuple[int, ...] | None
    target_hidden_size: int
    num_taps: int
    max_position_embeddings: int
    rope: dict[str, Any] = field(default_factory=lambda: dict(DEFAULT_ROPE))
    rms_norm_eps: float = 1e-5
    mask_token_id: int | None = None
    norm_before_residual: bool = False  # the residual of layer 0 is the normed hidden state
    norm_before_fc: bool = False  # one norm over all taps before fc
    fc_norm: bool = False  # one norm per tap before fc
    norm_output: bool = False  # EAGLE-3 feeds back the normed output
    attention_bias: bool = False
    inject: bool = False  # the combined taps enter every layer, not only the first
    bidirectional: bool = False  # the mask rows of a block see each other, also later ones
    convolution: bool = False  # a mask row adds the state of the row before it (convolution.py)
    refinement: int = 0  # passes in which rows know the drafts before them (refinement.py); 0: none
    # A row attends to the last `sliding_window` positions, its own included; None: to all.
    sliding_window: int | None = None
    dependency: int = 0  # rank of the correction by the previous draft (dependency.py); 0: none
    confidence: bool = False  # an output that corrects the acceptance probability of a row's draft
    # Factor on the logits of depth k before log-probabilities are computed; empty: 1 everywhere.
    calibration: tuple[float, ...] = ()
    k_trained: int | None = None
    target: str | None = None
    target_revision: str | None = None
    trained: bool = True

    def __post_init__(self) -> None:
        if self.method == "p-eagle" and self.mask_token_id is None:
            raise UserError(
                "a p-eagle drafter needs a mask token: set `mask_token_id` (ptd_token_id in vLLM's"
                " format)"
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise UserError(
                f"`mask_token_id` is {self.mask_token_id}, outside the vocabulary of"
                f" {self.vocab_size}: choose a smaller id"
            )
        if self.aux_layer_ids is not None:
            self._check_aux_layer_ids(self.aux_layer_ids)
        check_window(self.sliding_window, "sliding_window")
        self._check_refinement()
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"the number of heads, {self.num_heads}, is not a multiple of the"
                f" {self.num_kv_heads} key-value heads: change `num_heads` or `num_kv_heads`"
            )

    def _check_refinement(self) -> None:
        if self.refinement not in range(MAX_REFINEMENT + 1):
            raise UserError(f"`refinement` is {self.refinement}: use 0 to {MAX_REFINEMENT} passes")
        if self.refinement and self.method != "p-eagle":
            raise UserError("`refinement` needs a p-eagle drafter: set it to 0")

    def _check_aux_layer_ids(self, ids: tuple[int, ...]) -> None:
        if len(ids) != self.num_taps:
            raise UserError(
                f"`aux_layer_ids` has {len(ids)} ids, but fc takes {self.num_taps} taps:"
                " give one id for each tap"
            )
        if list(ids) != sorted(set(ids)):
            raise UserError(
                f"`aux_layer_ids` {list(ids)} must be ascending without repeats:"
                " vLLM taps each layer once, in the order of the layers"
            )

    @property
    def pruned(self) -> bool:
        """Whether the draft vocabulary is a part of the target's."""
        return self.draft_vocab_size != self.vocab_size

    def misfits(self, target: "Target") -> list[str]:
        """Why this drafter cannot draft for `target`, one line per reason; empty if it can."""
        lines = []
        if self.target_hidden_size != target.hidden_size:
            lines.append(
                f"hidden size {self.target_hidden_size} against the target's {target.hidden_size}"
            )
        if self.vocab_size != target.vocab_size:
            lines.append(f"vocabulary {self.vocab_size} against the target's {target.vocab_size}")
        layers = len(target.layers)
        if invalid := [i for i in self.aux_layer_ids or () if not 0 <= i < layers]:
            lines.append(f"aux layers {invalid}, but the target has layers 0 to {layers - 1}")
        return lines

    def require_fit(self, target: "Target") -> None:
        if lines := self.misfits(target):
            trained_for = f" (it was made for {self.target})" if self.target else ""
            raise UserError(
                f"the drafter does not fit target {target.name!r}{trained_for}: {'; '.join(lines)}."
                " Use the target it was trained for, or train one for this target"
            )


def config_for(
    target: "Target",
    method: Method,
    num_layers: int,
    aux_layer_ids: tuple[int, ...] | None = None,
    mask_token_id: int | None = None,
    draft_vocab_size: int | None = None,
    intermediate_size: int | None = None,
    **switches: Any,
) -> DrafterConfig:
    """Configure a drafter with the target's width, heads, RoPE, context and, by default, MLP."""
    from peagle.target import default_aux_layer_ids
    from peagle.target.rope import freeze_parameters

    text = target.config
    ids = aux_layer_ids or default_aux_layer_ids(len(target.layers))
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    target_mlp = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return DrafterConfig(
        method=method,
        num_layers=num_layers,
        hidden_size=text.hidden_size,
        intermediate_size=intermediate_size or target_mlp,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        vocab_size=text.vocab_size,
        draft_vocab_size=draft_vocab_size or text.vocab_size,
        aux_layer_ids=ids,
        target_hidden_size=text.hidden_size,
        num_taps=len(ids),
        max_position_embeddings=target.max_context,
        rope=freeze_parameters(rope_parameters(text), target.context, target.max_context, head_dim),
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-5),
        mask_token_id=mask_token_id if method == "p-eagle" else None,
        target=target.name,
        target_revision=target.revision,
        **switches,
    )


def rope_parameters(text_config: Any) -> dict[str, Any]:
    """RoPE parameters in the form of transformers.

    For a target with one set per layer type, those of its full-attention layers.
    """
    rope = dict(getattr(text_config, "rope_parameters", None) or DEFAULT_ROPE)
    if "rope_type" not in rope:
        rope = dict(rope.get("full_attention") or next(iter(rope.values())))
    return rope
