"""FusedProbe: whether the fused layers of a Llama compute what the target's own modules do.

Both run the same tokens: once at the first positions, and once at positions spread up to the end of
the context, where some models scale their queries (Ministral 3) or change their RoPE. A few rows
suffice for that, because a row's position need not be its place among the keys.

    row            0   1   2  ..  23   24    25    26  ..    47
    request        0   0   0  ..   0    1     1     1  ..     1
    attends to     0  0-1 0-2 ..  0-23  0    0-1   0-2 ..   0-23    of its own request
    position       0   1   2  ..  23    0   356   712  ..  8191     (for a context of 8192)

Three things must agree:

* What attention is asked for: a scale of head_dim ** -0.5, a sliding window, and nothing else.
* The queries, keys and values of every layer and row, given the same input of the layer. Rounding
  does not add up there, and attention cannot hide a difference.
* The logits.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peagle.engine.kv.kv_cache import KVCache, KVShape
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.hf_paged import HFPagedTarget
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.add_norm import add_norm
from peagle.kernels.triton.rope_store import rope_store

PROBE_TOKENS = 24  # of each request
PROBE_PAGE_SIZE = 16
# Largest accepted norm of the difference of the logits, relative to their norm. In half precision,
# rounding alone gives 0.02 for 32 layers, and another architecture gives 0.3 and more.
MAX_ERROR_FLOAT32 = 1e-3
MAX_ERROR_HALF = 0.1
# The same for the query, key and value of one row. In half precision, rounding gives 0.004.
MAX_ROW_ERROR_HALF = 0.02
# Arguments of an attention function that do not change what it computes without a gradient.
NEUTRAL_ARGUMENTS = frozenset({"dropout", "position_ids", "use_cache"})
FUSED_ARGUMENTS = frozenset({"scaling", "sliding_window"})


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer passes to its attention function."""

    query: Tensor  # [T, heads, head_dim]
    arguments: dict[str, Any]

    def is_plain(self) -> bool:
        """Whether the fused layers support it."""
        scaling = self.arguments.get("scaling")
        other_arguments = self.arguments.keys() - NEUTRAL_ARGUMENTS - FUSED_ARGUMENTS
        return scaling in (None, self.query.shape[-1] ** -0.5) and all(
            self.arguments[name] is None for name in other_arguments
        )


class FusedProbe:
    @torch.inference_mode()
    def __init__(self, hf_paged: HFPagedTarget, shapes: list[KVShape], length: int) -> None:
        """Run the target's own modules. `shapes`: of its layers; `length`: positions to probe."""
        device = hf_paged.model.device
        generator = torch.Generator().manual_seed(0)
        vocab_size = hf_paged.model.get_input_embeddings().weight.shape[0]
        self.shapes = shapes
        self.ids = torch.randint(vocab_size, (PROBE_TOKENS,), generator=generator)
        self.ids = self.ids.repeat(2).to(device)
        self.rows = probe_rows(length, device)
        self.calls: dict[int, AttentionCall] = {}
        self.kv_cache = self._new_cache()
        hf_paged.taps = tuple(range(len(shapes)))
        hf_paged.on_attention = self._record
        self.logits, hidden = hf_paged.forward(self.ids, self.rows, self.kv_cache)
        hf_paged.on_attention = None
        hf_paged.taps = ()
        self.streams = hidden.chunk(len(shapes), -1)  # [T, d] entering each layer
        self.is_half = self.logits.dtype != torch.float32

    def is_plain_attention(self) -> bool:
        """Whether the fused layers support everything that the target's attention is asked for."""
        return all(call.is_plain() for call in self.calls.values())

    @torch.inference_mode()
    def equals(self, fused: FusedLlamaTarget) -> bool:
        """Whether the fused layers compute what the target does."""
        kv_cache = self._new_cache()
        max_row_error = MAX_ROW_ERROR_HALF if self.is_half else MAX_ERROR_FLOAT32
        if any(
            self._row_error(fused, i, kv_cache) > max_row_error for i in range(len(self.shapes))
        ):
            return False
        logits, _ = fused.forward(self.ids, self.rows, kv_cache)
        pairs = zip(logits.float().chunk(2), self.logits.float().chunk(2), strict=True)
        error = max(float((mine - own).norm() / own.norm()) for mine, own in pairs)
        return error <= (MAX_ERROR_HALF if self.is_half else MAX_ERROR_FLOAT32)

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

    def _new_cache(self) -> KVCache:
        return KVCache(self.shapes, 4, PROBE_PAGE_SIZE, self.ids.device)

    def _record(self, layer: int, query: Tensor, arguments: dict[str, Any]) -> None:
        """query [1, heads, T, d], as an attention function of transformers receives it."""
        self.calls[layer] = AttentionCall(query[0].transpose(0, 1).clone(), arguments)


def row_error(mine: Tensor, own: Tensor) -> float:
    """The largest norm of a row's difference, relative to the row's norm; not finite: infinite."""
    mine, own = (x.flatten(1).float() for x in (mine, own))
    error = (mine - own).norm(dim=1) / own.norm(dim=1).clamp(min=1e-6)
    return float(error.nan_to_num(nan=torch.inf).max())


def probe_rows(length: int, device: torch.device) -> RowPass:
    """Two requests, each in two pages in reverse order; see the table at the top of the file."""
    places = torch.arange(PROBE_TOKENS, device=device)
    spread = torch.linspace(0, length - 1, PROBE_TOKENS, dtype=torch.float64).long().to(device)
    positions = torch.cat([places.clamp(max=length - 1), spread])
    tables = torch.tensor([[1, 0], [3, 2]], dtype=torch.int32, device=device)
    pages = tables.long()[:, places // PROBE_PAGE_SIZE]  # [2, places]
    slots = (pages * PROBE_PAGE_SIZE + places % PROBE_PAGE_SIZE).flatten()
    counts = torch.full((2,), PROBE_TOKENS, dtype=torch.int32, device=device)
    starts = torch.tensor([0, PROBE_TOKENS], dtype=torch.int32, device=device)
    first = torch.zeros_like(counts)
    return RowPass(positions, slots, tables, starts, counts, first, PROBE_TOKENS, PROBE_PAGE_SIZE)
