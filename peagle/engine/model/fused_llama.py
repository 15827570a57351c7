"""A Llama-like stack of layers with merged projections and fused kernels.

The MLP of a layer is dense, or a mixture of experts; attention may have sinks and windows.

The same layers run a target and its drafter, on a GPU (Triton) and on a CPU (C, or the reference
of each kernel). A target runs this way only if its modules are those of a Llama and its logits
equal those of transformers (`build_verifier` compares them).
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from peagle.drafter import Drafter
from peagle.drafter.convolution import GATE_EPS, convolve_rows
from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model.attention import attend_qkv
from peagle.engine.model.dense_mlp import DenseMLP
from peagle.engine.model.merged_linear import merged_weight
from peagle.engine.model.mixture import (
    Mixture,
    RouterCounters,
    build_mixture,
    router_counters,
)
from peagle.engine.model.weight import Weight
from peagle.kernels.attention_params import AttentionHeads, AttentionParams
from peagle.kernels.cpu.layer import (
    FusedLayer,
    FusedLayers,
    LayerMatrices,
    LayerWorkspace,
    StackOutput,
)
from peagle.kernels.cpu.ops import supports_heads
from peagle.kernels.row_pass import RowPass
from peagle.kernels.stored_matrix import Table, table_rows
from peagle.kernels.triton.add_norm import add_norm
from peagle.kernels.triton.batch_invariant.paged_attention import find_lanes
from peagle.kernels.triton.batch_invariant.vendor_gemm import VendorRows
from peagle.kernels.triton.launch.compile_ahead import POINTER_ALIGNMENT, is_dry


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    qkv: Weight
    out: Weight
    mlp: DenseMLP | Mixture
    input_norm: Tensor
    post_attention_norm: Tensor
    eps: float
    head_dim: int
    heads: AttentionHeads
    attention: AttentionParams
    cpu_layer: FusedLayer | None = None  # the whole layer in one C call, where that is supported

    def run(
        self,
        normed: Tensor,
        residual: Tensor,
        rows: RowPass,
        kv_cache: KVCache,
        cache_layer: int,
        rope: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run the layer on normed [T, d or 2d], which attention reads, and residual [T, d].

        Returns the output of the MLP (possibly split-K partial sums) and the residual stream
        before that output is added.
        """
        keys = kv_cache.keys[cache_layer]
        values = kv_cache.values[cache_layer]
        cpu_layer = self.cpu_layer
        if cpu_layer is not None:
            workspace = rows.cached(
                "layer_workspace",
                lambda: LayerWorkspace.create(rows, rope, cpu_layer.scratch_width, normed.dtype),
            )
            return cpu_layer(normed, residual, workspace, keys, values)
        if self.attention.batch_invariant:
            find_lanes(rows, self.heads.num_heads, keys)
        qkv = self.qkv.split_k(normed)
        attended = attend_qkv(
            qkv, rows, rope, keys, values, self.heads, self.attention, kv_cache.arrived
        )
        x = self.out.split_k(attended.flatten(1))
        norm = self.post_attention_norm
        if isinstance(self.mlp, Mixture):
            return self.mlp.add_norm(x, residual, norm, self.eps)
        normed, residual = add_norm(x, residual, norm, self.eps)
        return self.mlp(normed), residual

    @property
    def weights(self) -> list[Weight]:
        return [self.qkv, self.out, *self.mlp.weights]

    @property
    def kernel_key(self) -> Hashable:
        """Equal for layers that launch the same kernels; layers with experts are not compared."""
        if isinstance(self.mlp, Mixture):
            return id(self)
        tensors = [self.input_norm, self.post_attention_norm, self.attention.sinks]
        tensors += [self.heads.q_norm, self.heads.k_norm]
        for weight in self.weights:
            tensors += [weight.weight, weight.bias, weight.skinny_weight, weight.skinny_scales]
        return self.attention.window, *map(tensor_key, tensors)

    def with_cpu_layer(self) -> "LlamaLayer":
        """The same layer, run by one C call where that is supported."""
        matrices = self._packed_matrices()
        group = self.heads.num_heads // self.heads.num_kv_heads
        if matrices is None or not supports_heads(self.head_dim, group):
            return self
        cpu_layer = FusedLayer(
            matrices,
            self.input_norm,
            self.post_attention_norm,
            self.heads,
            self.head_dim,
            self.attention,
        )
        return replace(self, cpu_layer=cpu_layer)

    def _packed_matrices(self) -> LayerMatrices | None:
        """None if some matrix is not packed."""
        qkv, out = self.qkv.matrix, self.out.matrix
        if qkv is None or out is None:
            return None
        if isinstance(self.mlp, Mixture):
            moe = self.mlp.packed_moe
            return None if moe is None else LayerMatrices(qkv, out, moe=moe)
        gate_up, down = self.mlp.gate_up.matrix, self.mlp.down.matrix
        if gate_up is None or down is None:
            return None
        return LayerMatrices(qkv, out, gate_up, down)

    def quantized(self) -> "LlamaLayer":
        """Quantize the weights to int8, and return the layer that uses them."""
        for part in (self.qkv, self.out, self.mlp):
            part.quantize()
        return self.with_cpu_layer()


def build_layer(
    module: Any,
    eps: float,
    head_dim: int,
    window: int | None = None,
    counters: RouterCounters | None = None,
) -> LlamaLayer:
    """Build the layer from a transformers module or a drafter block, which use the same names.

    `counters`: of the mixture, if the layer has one.
    """
    attention = module.self_attn
    sinks = getattr(attention, "sinks", None)
    head_norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    q_norm, k_norm = (None if norm is None else norm.weight.detach() for norm in head_norms)
    num_heads = attention.q_proj.weight.shape[0] // head_dim
    num_kv_heads = attention.k_proj.weight.shape[0] // head_dim
    dtype = module.input_layernorm.weight.dtype
    layer = LlamaLayer(
        qkv=merged_weight([attention.q_proj, attention.k_proj, attention.v_proj], dtype),
        out=merged_weight([attention.o_proj], dtype),
        mlp=build_mlp(module.mlp, dtype, counters),
        input_norm=module.input_layernorm.weight.detach(),
        post_attention_norm=module.post_attention_layernorm.weight.detach(),
        eps=eps,
        head_dim=head_dim,
        heads=AttentionHeads(num_heads, num_kv_heads, q_norm, k_norm, eps),
        attention=AttentionParams(
            head_dim**-0.5, window, sinks=None if sinks is None else sinks.detach()
        ),
    )
    return layer.with_cpu_layer()


def tensor_key(tensor: Tensor | None) -> Hashable:
    """What kernels depend on."""
    if tensor is None:
        return None
    return tensor.shape, tensor.dtype, tensor.data_ptr() % POINTER_ALIGNMENT


def build_mlp(
    module: Any, dtype: torch.dtype, counters: RouterCounters | None
) -> DenseMLP | Mixture:
    if counters is not None:
        return build_mixture(module, dtype, counters)
    return DenseMLP(
        merged_weight([module.gate_proj, module.up_proj], dtype),
        merged_weight([module.down_proj], dtype),
    )


def fuse_layers(layers: Sequence[LlamaLayer]) -> FusedLayers | None:
    """The layers in one C call, where that is supported."""
    fused = [layer.cpu_layer for layer in layers if layer.cpu_layer is not None]
    return FusedLayers(fused) if len(fused) == len(layers) else None


def fuse_inputs(
    embeds: Tensor, hidden: Tensor, input_norm: Tensor, hidden_norm: Tensor, eps: float
) -> Tensor:
    """cat[norm(embeds), norm(hidden)], [T, 2d]: what the attention of a drafter's layer 0 reads."""
    rows, d = hidden.shape
    fused_input = torch.empty(rows, 2 * d, dtype=hidden.dtype, device=hidden.device)
    add_norm(embeds, None, input_norm, eps, out=fused_input[:, :d])
    add_norm(hidden, None, hidden_norm, eps, out=fused_input[:, d:])
    return fused_input


def rope_table(rotary: nn.Module, length: int, device: torch.device) -> Tensor:
    """[length, rotated dims] float32: the cosines of each position, then its sines."""
    positions = torch.arange(length, device=device)[None]
    cos, sin = (x[0].float() for x in rotary(torch.zeros(1, device=device), positions))
    half = cos.shape[-1] // 2
    if torch.equal(cos[:, :half], cos[:, half:]):  # Most models repeat them; GPT-OSS does not.
        cos, sin = cos[:, :half], sin[:, :half]
    return torch.cat([cos, sin], -1).contiguous()


NO_KERNEL = "some of its matrices have no kernel whose sums do not depend on the batch"


class FusedLlamaTarget:
    def __init__(self, target: Any, length: int, windows: Mapping[int, int | None]) -> None:
        """`windows`: the sliding window of each layer, as transformers passes it to attention.

        They are given because a short probe would not notice a long window that is missing.
        """
        decoder = target.model.get_decoder()
        config = target.config
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        self.eps = config.rms_norm_eps
        counters = router_counters([layer.mlp for layer in target.layers], target.device)
        self.layers = [
            build_layer(layer, self.eps, head_dim, windows[i], counters[i])
            for i, layer in enumerate(target.layers)
        ]
        # [mixtures, E + 1] int32: the rows of each expert in the last pass, and the number of
        # experts that had rows; None without mixtures.
        self.expert_counts = next((x.all_counts for x in counters if x is not None), None)
        self.norm = decoder.norm.weight.detach()
        self.embed_table: Table = target.embedding_table
        self.lm_head = Weight(target.head_table, dtype=self.norm.dtype)
        self.rope = rope_table(decoder.rotary_emb, length, target.device)
        self.taps: tuple[int, ...] = ()
        self.batch_invariant = False  # see `use_batch_invariant`
        self.int8 = False  # see `quantize`
        self.cpu_layers = fuse_layers(self.layers)

    def use_codes(self) -> float:
        """Multiply with the codes of a quantized target where kernels read them.

        Returns the fraction of matrices for which that is so.
        """
        uses_codes = [weight.use_codes() for layer in self.layers for weight in layer.weights]
        self.layers = [layer.with_cpu_layer() for layer in self.layers]
        self.cpu_layers = fuse_layers(self.layers)
        return sum(uses_codes) / len(uses_codes)

    @property
    def uses_c_kernels(self) -> bool:
        """Whether all layers and lm_head run in C, on a CPU."""
        return self.cpu_layers is not None and self.lm_head.matrix is not None

    def use_batch_invariant(self, enabled: bool = True, prove: bool = True) -> str | None:
        """Compute every row in an order that neither the batch nor the draft decides, from now on.

        Returns None, or the reason why no kernels do that here. The C kernels always do.
        `prove`: on a GPU, find out which products the vendor's library may compute.
        """
        if self.uses_c_kernels:
            return None
        if self.expert_counts is not None:
            on_gpu = self.norm.is_cuda
            return "the sums of its experts depend on the number of rows" if on_gpu else NO_KERNEL
        weights = [self.lm_head, *(w for layer in self.layers for w in layer.weights)]
        if not all(weight.use_batch_invariant(enabled) for weight in weights):
            for weight in weights:
                weight.use_batch_invariant(False)
            return NO_KERNEL
        self.layers = [
            replace(layer, attention=replace(layer.attention, batch_invariant=enabled))
            for layer in self.layers
        ]
        self.batch_invariant = enabled
        if enabled and prove and self.norm.is_cuda:
            vendor_rows = VendorRows()
            vendor_rows.prove(self.plain_products())
            for weight in weights:
                weight.vendor_rows = vendor_rows
        return None

    @contextmanager
    def assumed_batch_invariant(self) -> Iterator[bool]:
        """As after `use_batch_invariant`, inside this block; False: no kernels do that here."""
        supported = self.use_batch_invariant(prove=False) is None
        try:
            yield supported
        finally:
            if supported:
                self.use_batch_invariant(False)

    def plain_products(self) -> list[tuple[Tensor, bool]]:
        """Matrices that the vendor's library may multiply with, and whether they are gated."""
        gated = {id(layer.mlp.gate_up) for layer in self.layers if isinstance(layer.mlp, DenseMLP)}
        weights = [self.lm_head, *(w for layer in self.layers for w in layer.weights)]
        return [
            (w.weight, id(w) in gated)
            for w in weights
            if w.weight is not None and w.weight is w.skinny_weight
        ]

    @property
    def is_stored(self) -> bool:
        """Whether the layers multiply with the weights of a GGUF file as stored."""
        return all(weight.is_stored for layer in self.layers for weight in layer.weights)

    def quantize(self) -> None:
        """Multiply in int8 from now on. The comparison with transformers comes before that."""
        self.cpu_layers = None
        for i in range(len(self.layers)):  # Each frees its packed floats before the next one.
            self.layers[i] = self.layers[i].quantized()
        self.cpu_layers = fuse_layers(self.layers)
        self.lm_head.quantize()
        self.int8 = True

    def forward(
        self, ids: Tensor, rows: RowPass, kv_cache: KVCache, logit_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Verifier.forward`."""
        x = table_rows(self.embed_table, ids, self.norm.dtype)
        x, residual, g = self.run_layers(x, rows, kv_cache)
        if logit_rows is not None:
            x, residual = x[..., logit_rows, :], residual[logit_rows]
        normed, _ = add_norm(x, residual, self.norm, self.eps)
        return self.lm_head(normed), g

    def run_layers(self, x: Tensor, rows: RowPass, kv_cache: KVCache) -> StackOutput:
        """x [T, d]: the embeddings, which may be overwritten."""
        if self.cpu_layers is not None:
            width = self.cpu_layers.scratch_width
            workspace = LayerWorkspace.create(rows, self.rope, width, x.dtype)
            keys, values = kv_cache.keys, kv_cache.values
            return self.cpu_layers(x.contiguous(), workspace, keys, values, self.taps)
        if self.expert_counts is not None:
            self.expert_counts.zero_()
        residual: Tensor | None = None
        taps: dict[int, Tensor] = {}
        for i, layer in self._launched_layers(kv_cache):
            normed, residual = add_norm(x, residual, layer.input_norm, self.eps)
            if i in self.taps:
                taps[i] = residual
            x, residual = layer.run(normed, residual, rows, kv_cache, i, self.rope)
        assert residual is not None
        g = (
            torch.cat([taps[i] for i in self.taps], -1)
            if self.taps
            else x.new_empty(*rows.positions.shape, 0)
        )
        return StackOutput(x, residual, g)

    def _launched_layers(self, kv_cache: KVCache) -> Iterator[tuple[int, LlamaLayer]]:
        """All layers; in a dry pass, without those that launch the kernels of another one."""
        keys = set[Hashable]()
        for i, layer in enumerate(self.layers):
            if is_dry() and i > 0 and i not in self.taps:  # The first one has no residual stream.
                key = (layer.kernel_key, tensor_key(kv_cache.keys[i]))
                if key in keys:
                    continue
                keys.add(key)
            yield i, layer


class FusedLlamaDrafter:
    """The drafter's layers, in the same KV cache as the target's and behind them."""

    def __init__(self, drafter: Drafter, first_layer: int, length: int) -> None:
        """`first_layer`: the index of the drafter's first layer in the KV cache."""
        config = drafter.config
        blocks: Iterable[Any] = drafter.layers
        self.first_layer = first_layer
        self.eps = config.rms_norm_eps
        window = config.sliding_window
        self.layers = [build_layer(block, self.eps, config.head_dim, window) for block in blocks]
        self.rope = rope_table(drafter.rope, length, drafter.fc.weight.device)
        self.norm = drafter.norm.weight.detach()
        first_block: Any = drafter.layers[0]
        self.hidden_norm = first_block.hidden_norm.weight.detach()
        self.norm_before_residual = config.norm_before_residual
        # The projections of `hidden` into layers 1..N-1, merged; only some drafters have them.
        self.inject: Weight | None = None
        if len(drafter.inject):
            self.inject = merged_weight(list(drafter.inject), drafter.dtype)
        self.convolution: list[Any] = list(drafter.convolution)  # one for each layer, or none
        self.ones = torch.ones_like(self.norm)

    def quantize(self) -> None:
        """Multiply in int8 from now on."""
        self.layers = [layer.quantized() for layer in self.layers]
        if self.inject is not None:
            self.inject.quantize()

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        rows: RowPass,
        kv_cache: KVCache,
        is_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """embeds, hidden [T, d] -> the residual stream after the last layer [T, d]: normed, raw.

        Attention of layer 0 reads cat[input_norm(embeds), hidden_norm(hidden)]; its residual is
        `hidden`, normed or not. The other layers are plain Llama layers. A convolution needs
        `is_mask` [T, 1]; each mask row is behind the row before it.
        """
        d = hidden.shape[1]
        input_norm = self.layers[0].input_norm
        fused_input = fuse_inputs(embeds, hidden, input_norm, self.hidden_norm, self.eps)
        residual = fused_input[:, d:] if self.norm_before_residual else hidden
        first = self.first_layer
        x, residual = self.layers[0].run(fused_input, residual, rows, kv_cache, first, self.rope)
        x, residual = self._convolve(0, x, residual, is_mask)
        injected = None if self.inject is None else self.inject(hidden).unflatten(1, (-1, d))
        for i, layer in enumerate(self.layers[1:], start=1):
            if injected is not None:
                residual = residual + injected[:, i - 1]
            normed, residual = add_norm(x, residual, layer.input_norm, self.eps)
            x, residual = layer.run(normed, residual, rows, kv_cache, first + i, self.rope)
            x, residual = self._convolve(i, x, residual, is_mask)
        return add_norm(x, residual, self.norm, self.eps)

    def _convolve(
        self, layer: int, x: Tensor, residual: Tensor, is_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Add the rows before the mask rows to the output x + residual of a layer; x may be split.

        Returns x and residual again: their sum is the convolved output.
        """
        if not self.convolution or is_mask is None:
            return x, residual
        convolution = self.convolution[layer]
        normed, hidden = add_norm(x, residual, self.ones, GATE_EPS)
        return convolve_rows(hidden, convolution.gate(normed), convolution.base, is_mask), hidden
