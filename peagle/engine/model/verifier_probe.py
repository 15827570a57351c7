"""VerifierProbe: whether a verifier computes what the target does, found by a short pass.

Two requests of the same tokens run in one pass: at positions spread up to the end of the context,
where some models scale their queries (Ministral 3), and at the first positions. A few rows suffice,
because a row's position need not be its place among the keys.

    row            0    1    2   ..  23   24   25   26  ..   47
    request        0    0    0   ..   0    1    1    1  ..    1
    attends to     0   0-1  0-2  ..  0-23  0   0-1  0-2 ..  0-23    of its own request
    position       0   356  712  .. 8191   0    1    2  ..   23     (for a context of 8192)

Over pages, the target's own modules must give the logits of transformers at the first positions.

The fused layers of a Llama must agree with the target's own modules in three things:

* What attention is asked for: a scale of head_dim ** -0.5, a sliding window, sinks, nothing else.
* The queries, keys and values of every layer and row, given the same input of the layer. Rounding
  does not add up there, and attention cannot hide a difference.
* The logits.

In half precision, rounding may choose another expert for a row of a mixture. Logits differ then,
and so do a few rows of a layer. For mixtures, most rows of each layer must agree instead. In what a
layer adds, attention hides a difference of the experts: most rows of each mixture must agree too,
given the same input.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peagle.engine.kv.kv_cache import KVCache, KVShape
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.hf_paged import HFPagedTarget
from peagle.engine.model.mixture import Mixture
from peagle.errors import UserError
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.add_norm import add_norm
from peagle.kernels.triton.attention.rope_store import rope_store
from peagle.kernels.triton.launch.compile_ahead import compile_ahead
from peagle.target import Target
from peagle.target.residual_taps import ResidualTaps
from peagle.target.target import decoder_layers

PROBE_TOKENS = 24  # of each request, if the context holds as many
PROBE_PAGE_SIZE = 16
# Largest accepted norm of the difference of the logits, relative to their norm. In half precision,
# rounding alone gives 0.02 for 32 layers, and another architecture gives 0.3 and more.
MAX_ERROR_FLOAT32 = 1e-3
MAX_ERROR_HALF = 0.1
# At spread positions, rounding gives more: 0.034 for SmolLM2-135M, instead of 0.009.
MAX_SPREAD_ERROR_HALF = 0.3
# The same for the query, key and value of one row: rounding gives 0.0006 for SmolLM2-135M.
MAX_ROW_ERROR_HALF = 0.02
# The same for what a layer with experts adds to the residual stream, for the median of the rows.
MAX_LAYER_ERROR_HALF = 0.25
# The same for the output of a mixture: rounding gives 0.006 for tiny ones.
MAX_MIXTURE_ERROR_HALF = 0.05
# From here on a target is refused. Between experts, rounding may decide otherwise.
MIN_WRONG_ERROR_FLOAT32 = 0.01
MIN_WRONG_ERROR_HALF = 0.5
# Arguments of an attention function that do not change what it computes without a gradient.
NEUTRAL_ARGUMENTS = frozenset({"dropout", "output_router_logits", "position_ids", "use_cache"})
FUSED_ARGUMENTS = frozenset({"scaling", "sliding_window", "s_aux"})


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer passes to its attention function."""

    query: Tensor  # [T, heads, head_dim]
    arguments: dict[str, Any]

    def is_plain(self, sinks: Tensor | None) -> bool:
        """Whether the fused layers support it; `sinks`: those of the layer, if it has any."""
        scaling = self.arguments.get("scaling")
        other_arguments = self.arguments.keys() - NEUTRAL_ARGUMENTS - FUSED_ARGUMENTS
        return (
            scaling in (None, self.query.shape[-1] ** -0.5)
            and self.arguments.get("s_aux") is sinks
            and all(self.arguments[name] is None for name in other_arguments)
        )


class VerifierProbe:
    def __init__(self, target: Target, shapes: list[KVShape], length: int) -> None:
        """`shapes`: what the target's layers store. `length`: of the longest request."""
        self.target = target
        self.shapes = shapes
        self.rows = probe_rows(length, target.device)
        count = self.rows.max_rows
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(target.vocab_size, (count,), generator=generator)
        self.tokens = tokens.to(target.device)
        self.ids = self.tokens.repeat(2)
        self.calls: dict[int, AttentionCall] = {}
        # Some layer attends twice in a pass (DiffLlama), but has pages for one set of values only.
        self.attends_twice = False
        self.kv_cache = self._new_cache()
        self.fused_cache = self._new_cache()
        # What kernels depend on.
        self.description = f"probe {describe_target(target)} {length}"

    def compile_target(self, hf_paged: HFPagedTarget, wait: bool) -> None:
        """Compile the kernels of `run_target`. A pass that only starts to fills `calls`, too."""
        compile_ahead(
            lambda: self.run_target(hf_paged),
            self.ids.device,
            f"transformers {self.description}",
            wait,
        )

    @torch.inference_mode()
    def run_target(self, hf_paged: HFPagedTarget) -> None:
        """Run the target's own modules over pages."""
        self.calls.clear()
        self.attends_twice = False
        hf_paged.taps = tuple(range(len(self.shapes)))
        hf_paged.on_attention = self._record
        self.logits, hidden = hf_paged.forward(self.ids, self.rows, self.kv_cache)
        hf_paged.on_attention = None
        hf_paged.taps = ()
        self.streams = hidden.chunk(len(self.shapes), -1)  # [T, d] entering each layer
        self.is_half = self.logits.dtype != torch.float32

    def compile_fused(self, fused: FusedLlamaTarget, wait: bool) -> None:
        """Compile the kernels of `equals`."""
        compile_ahead(
            lambda: fused.forward(self.ids, self.rows, self.fused_cache),
            self.ids.device,
            f"fused {self.description}",
            wait,
        )

    @torch.inference_mode()
    def check_paged(self) -> None:
        """Raise if the target's own modules over pages do not give the logits of transformers."""
        limit = MIN_WRONG_ERROR_HALF if self.is_half else MIN_WRONG_ERROR_FLOAT32
        if self.attends_twice or self._paged_error() > limit:
            raise UserError(
                f"target {self.target.name!r} is not supported: over a paged KV cache, its modules"
                " compute something else than in transformers. Use another target"
            )

    def _paged_error(self) -> float:
        """The error of the logits; of a mixture in half precision, of the stream into layer 2.

        Behind many layers, a few rows with other experts have changed all of them.
        """
        if not self.is_half or len(self.streams) < 3 or not self._has_mixtures():
            expected = self.target.forward(self.tokens).logits
            return logits_error(self.logits[len(expected) :], expected)
        model = self.target.private_model()
        taps = ResidualTaps(decoder_layers(model), (2,))
        model(input_ids=self.tokens[None], use_cache=False)
        expected = taps.take()[0][0]
        return float(row_errors(self.streams[2][len(expected) :], expected).median())

    def _has_mixtures(self) -> bool:
        modules: list[Any] = list(self.target.layers)
        return any(hasattr(getattr(module, "mlp", None), "experts") for module in modules)

    def is_plain_attention(self) -> bool:
        """Whether the fused layers support everything that the target's attention is asked for."""
        modules: list[Any] = list(self.target.layers)
        return all(
            call.is_plain(getattr(modules[i].self_attn, "sinks", None))
            for i, call in self.calls.items()
        )

    @torch.inference_mode()
    def equals(self, fused: FusedLlamaTarget) -> bool:
        """Whether the fused layers compute what the target does."""
        kv_cache = self.fused_cache
        self.compile_fused(fused, wait=True)
        max_row_error = MAX_ROW_ERROR_HALF if self.is_half else MAX_ERROR_FLOAT32
        if any(
            self._row_error(fused, i, kv_cache) > max_row_error for i in range(len(self.shapes))
        ):
            return False
        if self.is_half and fused.expert_counts is not None:
            indices = range(len(self.shapes))
            return all(
                self._mixture_error(fused, i) <= MAX_MIXTURE_ERROR_HALF for i in indices
            ) and all(
                self._layer_error(fused, i, kv_cache) <= MAX_LAYER_ERROR_HALF for i in indices
            )
        logits, _ = fused.forward(self.ids, self.rows, kv_cache)
        spread, first = zip(logits.chunk(2), self.logits.chunk(2), strict=True)
        if not self.is_half:
            return max(logits_error(*spread), logits_error(*first)) <= MAX_ERROR_FLOAT32
        return (
            logits_error(*first) <= MAX_ERROR_HALF
            and logits_error(*spread) <= MAX_SPREAD_ERROR_HALF
        )

    def _row_error(self, fused: FusedLlamaTarget, index: int, kv_cache: KVCache) -> float:
        """The largest error of a query, key or value that the layer computes from its input."""
        layer = fused.layers[index]
        keys = kv_cache.keys[index]
        values = kv_cache.values[index]
        normed, _ = add_norm(self.streams[index].contiguous(), None, layer.input_norm, fused.eps)
        qkv = layer.qkv.split_k(normed)
        query = rope_store(qkv, self.rows, fused.rope, keys, values, layer.heads)
        slots = self.rows.kv_slots
        own_keys = self.kv_cache.keys[index]
        own_values = self.kv_cache.values[index]
        return max(
            row_error(query, self.calls[index].query),
            row_error(keys[slots], own_keys[slots]),
            row_error(values[slots], own_values[slots]),
        )

    def _layer_error(self, fused: FusedLlamaTarget, index: int, kv_cache: KVCache) -> float:
        """The median error of what the layer adds to its input; of the last layer, of the logits.

        `kv_cache` must hold the keys and values of the layer.
        """
        stream = self.streams[index].contiguous()
        assert fused.expert_counts is not None
        fused.expert_counts.zero_()
        layer = fused.layers[index]
        normed, residual = add_norm(stream, None, layer.input_norm, fused.eps)
        x, residual = layer.run(normed, residual, self.rows, kv_cache, index, fused.rope)
        normed, total = add_norm(x, residual, fused.norm, fused.eps)
        if index + 1 == len(self.streams):
            return float(row_errors(fused.lm_head(normed), self.logits).median())
        return float(row_errors(total - stream, self.streams[index + 1] - stream).median())

    def _mixture_error(self, fused: FusedLlamaTarget, index: int) -> float:
        """The median error of what the layer's experts compute; 0 for a dense layer."""
        layer = fused.layers[index]
        if not isinstance(layer.mlp, Mixture):
            return 0.0
        assert fused.expert_counts is not None
        fused.expert_counts.zero_()
        stream = self.streams[index].contiguous()
        normed, _ = add_norm(stream, None, layer.post_attention_norm, fused.eps)
        modules: list[Any] = list(self.target.layers)
        own = modules[index].mlp(normed[None])
        own = own[0] if isinstance(own, tuple) else own  # GPT-OSS returns scores too.
        nothing = torch.zeros_like(normed)
        _, mine = add_norm(layer.mlp(normed), nothing, layer.post_attention_norm, fused.eps)
        return float(row_errors(mine, own.view_as(mine)).median())

    def _new_cache(self) -> KVCache:
        return KVCache(self.shapes, 4, PROBE_PAGE_SIZE, self.ids.device)

    def _record(self, layer: int, query: Tensor, arguments: dict[str, Any]) -> None:
        """query [1, heads, T, d], as an attention function of transformers receives it."""
        self.attends_twice |= layer in self.calls
        self.calls[layer] = AttentionCall(query[0].transpose(0, 1).clone(), arguments)


def describe_target(target: Target) -> str:
    """What the kernels of a target depend on."""
    return f"{target.config.to_dict()} {target.dtype} {target.format}"


def logits_error(mine: Tensor, own: Tensor) -> float:
    """The norm of the difference, relative to the norm."""
    return float((mine.float() - own.float()).norm() / own.float().norm())


def row_error(mine: Tensor, own: Tensor) -> float:
    """The largest of `row_errors`."""
    return float(row_errors(mine, own).max())


def row_errors(mine: Tensor, own: Tensor) -> Tensor:
    """[T]: the norm of a row's difference, relative to the row's norm; not finite: infinite."""
    mine, own = (x.flatten(1).float() for x in (mine, own))
    error = (mine - own).norm(dim=1) / own.norm(dim=1).clamp(min=1e-6)
    return error.nan_to_num(nan=torch.inf)


def probe_rows(length: int, device: torch.device) -> RowPass:
    """Two requests, each in two pages in reverse order; see the table at the top of the file."""
    count = min(PROBE_TOKENS, length)
    places = torch.arange(count, device=device)
    spread = torch.linspace(0, length - 1, count, dtype=torch.float64).long().to(device)
    tables = torch.tensor([[1, 0], [3, 2]], dtype=torch.int32, device=device)
    pages = tables.long()[:, places // PROBE_PAGE_SIZE]  # [2, count]
    slots = (pages * PROBE_PAGE_SIZE + places % PROBE_PAGE_SIZE).flatten()
    counts = torch.full((2,), count, dtype=torch.int32, device=device)
    starts = torch.tensor([0, count], dtype=torch.int32, device=device)
    return RowPass(
        positions=torch.cat([spread, places]),
        kv_slots=slots,
        page_tables=tables,
        row_starts=starts,
        row_counts=counts,
        first_positions=torch.zeros_like(counts),
        max_rows=count,
        page_size=PROBE_PAGE_SIZE,
    )
