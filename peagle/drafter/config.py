"""What a drafter is: sizes, switches, and which target it was made for."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from peagle.core import Method
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.target import Target


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    method: Method
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layer_ids: (
        tuple[int, ...] | None
    )  # None: the checkpoint does not say; the target's default is taken
    target_hidden_size: int
    num_taps: int
    max_position_embeddings: int
    rope: dict[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    rms_norm_eps: float = 1e-5
    mask_token_id: int | None = None
    norm_before_residual: bool = False  # layer 0's residual is the normed hidden state
    norm_before_fc: bool = False  # one norm over all taps before fc
    fc_norm: bool = False  # one norm per tap before fc
    norm_output: bool = False  # EAGLE-3 feeds back the normed output
    attention_bias: bool = False
    inject: bool = False  # the fused taps enter every layer, not the first alone
    bidirectional: bool = False  # mask rows of a block see each other, later ones too
    dependency: int = 0  # rank of the correction by the draft before (dependency.py); 0: none
    confidence: bool = False  # an output that corrects how likely a row's draft is to be accepted
    calibration: tuple[
        float, ...
    ] = ()  # log-probabilities of depth k are of logits times this; empty: 1
    k_trained: int | None = None
    target: str | None = None
    target_revision: str | None = None
    trained: bool = True

    def __post_init__(self) -> None:
        if self.method == "p-eagle" and self.mask_token_id is None:
            raise UserError(
                "a p-eagle drafter needs a mask token id: set mask_token_id (ptd_token_id in vLLM's format)"
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise UserError(
                f"mask token id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}"
            )
        if self.aux_layer_ids is not None and len(self.aux_layer_ids) != self.num_taps:
            raise UserError(
                f"{len(self.aux_layer_ids)} aux layer ids, but fc takes {self.num_taps} taps"
            )
        if self.aux_layer_ids is not None and list(self.aux_layer_ids) != sorted(
            set(self.aux_layer_ids)
        ):
            raise UserError(
                f"aux layer ids {list(self.aux_layer_ids)} must rise without repeats:"
                " vLLM taps each layer once, in the order of the layers. Give them with aux_layer_ids"
            )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly"
            )

    @property
    def pruned(self) -> bool:
        return self.draft_vocab_size != self.vocab_size

    def misfits(self, target: "Target") -> list[str]:
        """Why this drafter cannot draft for that target: a line each, empty where it fits."""
        lines = []
        if self.target_hidden_size != target.hidden_size:
            lines.append(
                f"hidden size {self.target_hidden_size} against the target's {target.hidden_size}"
            )
        if self.vocab_size != target.vocab_size:
            lines.append(f"vocabulary {self.vocab_size} against the target's {target.vocab_size}")
        layers = len(target.layers)
        if bad := [i for i in self.aux_layer_ids or () if not 0 <= i < layers]:
            lines.append(f"aux layers {bad}, but the target has layers 0 to {layers - 1}")
        return lines

    def require_fit(self, target: "Target") -> None:
        if lines := self.misfits(target):
            made_for = f" (it was made for {self.target})" if self.target else ""
            raise UserError(
                f"the drafter does not fit target {target.name!r}{made_for}: {'; '.join(lines)}."
                " Use the target it was trained for, or train one for this target"
            )


def config_for(
    target: "Target",
    method: Method,
    num_layers: int,
    aux_layer_ids: tuple[int, ...] | None = None,
    mask_token_id: int | None = None,
    draft_vocab_size: int | None = None,
    **switches: Any,
) -> DrafterConfig:
    """A drafter of the target's own width: its heads, MLP, RoPE and context."""
    from peagle.target import default_aux_layer_ids

    text = target.config
    ids = aux_layer_ids or default_aux_layer_ids(len(target.layers))
    heads = text.num_attention_heads
    rope = rope_of(text)
    return DrafterConfig(
        method=method,
        num_layers=num_layers,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab_size=text.vocab_size,
        draft_vocab_size=draft_vocab_size or text.vocab_size,
        aux_layer_ids=ids,
        target_hidden_size=text.hidden_size,
        num_taps=len(ids),
        max_position_embeddings=target.context,
        rope=rope,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-5),
        mask_token_id=mask_token_id if method == "p-eagle" else None,
        target=target.name,
        target_revision=target.revision,
        **switches,
    )


def rope_of(text_config: Any) -> dict[str, Any]:
    """transformers' rope_parameters; for a target with one set per layer type, those of its full attention."""
    rope = dict(
        getattr(text_config, "rope_parameters", None)
        or {"rope_type": "default", "rope_theta": 10000.0}
    )
    if "rope_type" not in rope:
        rope = dict(rope.get("full_attention") or next(iter(rope.values())))
    return rope
