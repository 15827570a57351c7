"""The network of the drafter: the layers of block.py, for P-EAGLE and for EAGLE-3.

Rows are flat, [R, ...], without a batch axis. The model has neither a cache nor a mask: the caller
passes `attend` (block.py).
"""

from collections.abc import Callable
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from peagle.draft_shape import CANDIDATES_PER_DEPTH
from peagle.drafter.block import Attend, Block, Rope
from peagle.drafter.config import DrafterConfig
from peagle.drafter.convolution import PreviousRows, RowConvolution
from peagle.drafter.dependency import Dependency, select_chain
from peagle.drafter.linear import Linear
from peagle.drafter.refinement import Refinement, attend_in_blocks
from peagle.kernels.stored_matrix import StoredMatrix, Table, dense, select_rows, table_rows
from peagle.target.rope import VLLM_ROPE_KEYS, freeze_module, freeze_parameters


class Drafter(nn.Module):
    """The drafter. Frozen embeddings and lm_head rows are the target's own tensors, not copies.

    `set_embed_and_head` must be called before the drafter runs.
    """

    embed_tokens: Tensor  # [vocab_size, d]; None with weights of a GGUF file as stored
    lm_head: Tensor  # [draft_vocab_size, d]; None with weights of a GGUF file as stored
    target_ids: Tensor | None  # [draft_vocab_size] draft id -> target id; None: ids are the same

    def __init__(self, config: DrafterConfig, context: int | None = None) -> None:
        """`context`: for which RoPE is frozen (target/rope.py); None: the drafter's own."""
        super().__init__()
        self.config = config
        self.context = context
        self.gradient_checkpointing = False
        d = config.hidden_size
        eps = config.rms_norm_eps
        taps = config.num_taps
        tap_size = config.target_hidden_size
        self.input_norm = nn.RMSNorm(taps * tap_size, eps) if config.norm_before_fc else None
        self.fc_norm = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(tap_size, eps) for _ in range(taps))
        self.fc = Linear(taps * tap_size, d, bias=False)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(d, eps)
        parallel = config.method == "p-eagle"
        self.mask_hidden = random_parameter(taps * tap_size) if parallel else None
        self.mask_embedding = random_parameter(d, 0.02) if parallel else None
        # Optional parts draw from a forked generator, so that a seed gives the other weights the
        # same values with and without these parts.
        with torch.random.fork_rng(devices=[]):
            injected_layers = range(1, config.num_layers) if config.inject else ()
            self.inject = nn.ModuleList(Linear(d, d, bias=False) for _ in injected_layers)
            self.dependency = Dependency(d, config.dependency) if config.dependency else None
            self.confidence = Linear(d, 1) if config.confidence else None
            convolved_layers = range(config.num_layers if config.convolution else 0)
            self.convolution = nn.ModuleList(RowConvolution(d) for _ in convolved_layers)
            self.refinement = Refinement(config) if config.refinement else None
        self.rope = self.make_rope(config, context)
        self.stored_embedding: StoredMatrix | None = None
        self.stored_head: StoredMatrix | None = None
        for name in ("embed_tokens", "lm_head", "target_ids"):
            self.register_buffer(name, None, persistent=False)

    def with_window(self, window: int | None) -> "Drafter":
        """The same weights with another sliding window; None: with none."""
        other = copy(self)
        other.config = replace(self.config, sliding_window=window)
        return other

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations. Matrices may be narrower (linear.py)."""
        return self.norm.weight.dtype

    @property
    def embed_table(self) -> Table:
        return self.embed_tokens if self.stored_embedding is None else self.stored_embedding

    @property
    def head_table(self) -> Table:
        return self.lm_head if self.stored_head is None else self.stored_head

    @property
    def head_dtype(self) -> torch.dtype:
        """The dtype of the rows that `logits` multiplies with the head."""
        return self.lm_head.dtype if self.stored_head is None else self.dtype

    @staticmethod
    def make_rope(config: DrafterConfig, context: int | None = None) -> LlamaRotaryEmbedding:
        context = context or config.max_position_embeddings
        frozen = freeze_parameters(
            config.rope, context, config.max_position_embeddings, config.head_dim
        )
        llama = LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={
                name: value for name, value in frozen.items() if name not in VLLM_ROPE_KEYS
            },
        )
        rope = LlamaRotaryEmbedding(llama)
        freeze_module(rope, context)
        return rope

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Drafter":
        """Keep RoPE frequencies in float32 under `.to(dtype)`: rounded ones change the angles."""
        super()._apply(fn, recurse)
        self.rope = self.make_rope(self.config, self.context).to(self.fc.weight.device)
        return self

    def combine_hidden_states(self, g: Tensor) -> Tensor:
        """g [R, taps * d_target] -> hidden [R, d]."""
        if self.input_norm is not None:
            g = self.input_norm(g)
        if self.fc_norm is not None:
            chunks = g.chunk(self.config.num_taps, -1)
            normed = [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)]
            g = torch.cat(normed, -1)
        return self.fc(g)

    def embed(self, ids: Tensor) -> Tensor:
        """ids [R] -> embeddings [R, d]; the mask token has its own learned row."""
        embeds = self.token_embeddings(ids)
        if self.mask_embedding is None or self.config.mask_token_id is None:
            return embeds
        return torch.where(ids.eq(self.config.mask_token_id)[:, None], self.mask_embedding, embeds)

    def token_embeddings(self, ids: Tensor) -> Tensor:
        """ids [...] -> embeddings [..., d], the mask token's included."""
        if self.stored_embedding is None:
            return embedding(ids, self.embed_tokens)
        return table_rows(self.stored_embedding, ids, self.dtype)

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
        previous: PreviousRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run all layers; `previous` is called by drafters with a convolution only.

        embeds, hidden [R, d], positions [R] -> (normed output for `logits`, hidden state that
        EAGLE-3 feeds back), [R, d] each.
        """
        rope = self.rope_angles(hidden, positions)
        combined = hidden
        for i, block in enumerate(self.layers):
            if i and self.config.inject:
                hidden = hidden + self.inject[i - 1](combined)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                hidden = checkpoint(block, hidden, embeds, rope, attend, use_reentrant=False)
            else:
                hidden = block(hidden, embeds, rope, attend)
            if previous is not None and self.config.convolution:
                before = previous(i, hidden)
                if before is not None:
                    hidden = hidden + self.convolution[i](hidden, before)
        normed = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden

    def rope_angles(self, hidden: Tensor, positions: Tensor) -> Rope:
        """The angles of rows at positions [R], in the dtype of `hidden`."""
        cos, sin = self.rope(hidden, positions[None])
        return cos[0, :, None], sin[0, :, None]  # [R, 1, rotated dims]

    def refine(self, normed: Tensor, newest: Tensor) -> Tensor:
        """Rows that predict draft 1..K after the tokens newest [B], refined: [B, K, d] each."""
        batch, k = normed.shape[:2]
        depth = torch.arange(k, device=normed.device).repeat(batch)
        refined = normed
        for _ in range(self.config.refinement):
            drafts = self.greedy_token_ids(refined[:, :-1].flatten(0, 1)).view(batch, k - 1)
            previous = torch.cat([newest[:, None], drafts], 1).flatten()
            rows = self.refine_rows(normed.flatten(0, 1), previous, depth, attend_in_blocks(k))
            refined = rows.view_as(normed)
        return refined

    def refine_rows(
        self, normed: Tensor, previous_ids: Tensor, depth: Tensor, attend: Attend
    ) -> Tensor:
        """One pass over rows [R, d] of these depths [R], given the token before each draft, [R].

        It computes in the drafter's dtype; the result has that of `normed`.
        """
        assert self.refinement is not None
        rows = normed.to(self.dtype)
        embeds = self.token_embeddings(previous_ids).to(self.dtype)
        rope = self.rope_angles(rows, depth)
        return self.refinement(rows, embeds, rope, attend).to(normed.dtype)

    def logits(self, normed: Tensor) -> Tensor:
        """normed [R, d] -> [R, draft_vocab_size]."""
        if self.stored_head is None:
            return linear(normed, self.lm_head)
        return linear(normed, dense(self.stored_head, normed.dtype))

    def greedy_token_ids(self, normed: Tensor) -> Tensor:
        """normed [R, d] -> the most likely target id of each row, [R]."""
        return self.target_token_ids(self.logits(normed).argmax(-1))

    def target_token_ids(self, draft_ids: Tensor) -> Tensor:
        """Map ids of the draft vocabulary to ids of the target's vocabulary."""
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]

    def confidence_logits(self, normed: Tensor, logprobs: Tensor) -> Tensor:
        """Log-odds [...] that drafts are accepted.

        They are the log-odds of the drafts' log-probabilities [...], plus what the confidence
        output adds for their rows, normed [..., d].
        """
        odds = logprobs - torch.log(-torch.expm1(logprobs.clamp(max=-1e-6)))
        return odds if self.confidence is None else odds + self.confidence(normed)[..., 0].float()

    def drafts(self, normed: Tensor) -> Tensor:
        """Rows that predict draft 1..K, normed [B, K, d] -> drafts as target ids, [B, K]."""
        if self.dependency is None:
            return self.greedy_token_ids(normed.flatten(0, 1)).view(normed.shape[:2])
        ids, pair_logits = self.score_pairs(normed)
        return self.target_token_ids(ids.gather(2, select_chain(pair_logits)[..., None])[..., 0])

    def score_pairs(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """normed [B, K, d] -> (draft ids of the candidates [B, K, M], pair logits [B, K, M, M])."""
        assert self.dependency is not None
        all_logits = self.logits(normed.flatten(0, 1)).float().view(*normed.shape[:2], -1)
        logits, ids = all_logits.topk(min(CANDIDATES_PER_DEPTH, all_logits.shape[-1]), -1)
        embeds = self.token_embeddings(self.target_token_ids(ids))
        head_rows = table_rows(self.head_table, ids)
        return ids, self.dependency.score_pairs(normed, logits, embeds, head_rows)

    def set_embed_and_head(
        self, embed_tokens: Table, lm_head: Table, target_ids: Tensor | None = None
    ) -> None:
        """Use these tables of the target or a checkpoint; `target_ids` prunes the vocabulary."""
        config = self.config
        if config.pruned and target_ids is not None and len(lm_head) == config.vocab_size:
            lm_head = select_rows(lm_head, target_ids)
        assert embed_tokens.shape == (config.vocab_size, config.hidden_size), embed_tokens.shape
        assert lm_head.shape == (config.draft_vocab_size, config.hidden_size), lm_head.shape
        assert (target_ids is not None) == config.pruned
        if isinstance(embed_tokens, StoredMatrix):
            self.stored_embedding = embed_tokens
        else:
            self.embed_tokens = embed_tokens.detach()
        if isinstance(lm_head, StoredMatrix):
            self.stored_head = lm_head
        else:
            self.lm_head = lm_head.detach()
        self.target_ids = target_ids

    def make_embeddings_trainable(self) -> None:
        """Replace the shared embedding table by a float32 parameter of the drafter."""
        table = self.embed_tokens.detach().float().clone()
        del self.embed_tokens
        self.embed_tokens = nn.Parameter(table)


def causal_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention without a cache: every row sees itself and the rows before it."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, R, head_dim]
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def masked_attend(mask: Tensor) -> Attend:
    """Attention without a cache: row i sees row j where mask [R, R] is true at [i, j]."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, R, head_dim]
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


def row_mask(
    rows: int,
    past: int = 0,
    block: int = 0,
    device: torch.device | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention mask [rows, past + rows] of new rows behind `past` cached ones.

    Row i sees the last `window` positions up to itself; the last `block` rows also see each other.
    """
    mask = torch.ones(rows, past + rows, dtype=torch.bool, device=device).tril(past)
    if window is not None:
        mask = mask.triu(past - window + 1)
    mask[rows - block :, past + rows - block :] = True
    return mask


def random_parameter(size: int, scale: float = 1.0) -> nn.Parameter:
    """[size]; `no_meta_initialization` leaves out its values, unlike those of `torch.randn`."""
    return nn.Parameter(nn.init.normal_(torch.empty(size)).mul_(scale))
