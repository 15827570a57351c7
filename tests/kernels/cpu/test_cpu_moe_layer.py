"""Layers with sinks and experts in one C call give the same bits as separate kernel calls."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from peagle.kernels.attention_params import AttentionHeads, AttentionParams
from peagle.kernels.cpu import ops
from peagle.kernels.cpu.experts import PackedExperts, PackedMoe
from peagle.kernels.cpu.layer import FusedLayer, FusedLayers, LayerMatrices, LayerWorkspace
from peagle.kernels.cpu.matrix import PackedMatrix
from peagle.kernels.expert_matrices import GatedActivation
from peagle.kernels.row_pass import RowPass
from tests.support.kernels.comparing import some
from tests.support.kernels.expert_layers import some_expert_matrices

pytestmark = pytest.mark.usefixtures("cpu_level")
DTYPES = [torch.float32, torch.bfloat16]
HEADS = AttentionHeads(4, 2, eps=1e-5)
HEAD_DIM = 16
HIDDEN = 64
EXPERTS = 8
ACTIVATION = GatedActivation(interleaved=True, alpha=1.702, limit=7.0, up_shift=1.0)
PAGE_SIZE = 16
COUNTS = (5, 20)
FIRSTS = (9, 0)


def some_matrix(outputs: int, inputs: int, seed: int) -> PackedMatrix:
    weight = some(outputs, inputs, seed=seed) / inputs**0.5
    return PackedMatrix(weight.bfloat16(), some(outputs, seed=seed + 1))


def make_layer(seed: int, window: int | None, dtype: torch.dtype) -> FusedLayer:
    width = HEADS.num_heads * HEAD_DIM
    experts = PackedExperts(
        some_expert_matrices("mxfp4", EXPERTS, 192, HIDDEN, bias=True, seed=seed),
        some_expert_matrices("mxfp4", EXPERTS, HIDDEN, 96, bias=True, seed=seed + 20),
        ACTIVATION,
    )
    matrices = LayerMatrices(
        some_matrix(2 * width, HIDDEN, seed),
        some_matrix(HIDDEN, width, seed + 2),
        moe=PackedMoe(experts, some_matrix(EXPERTS, HIDDEN, seed + 4), 3, normalized=True),
    )
    norms = (1 + some(HIDDEN, seed=seed + i) / 9 for i in (6, 7))
    params = AttentionParams(HEAD_DIM**-0.5, window, sinks=some(4, seed=seed + 8).to(dtype))
    return FusedLayer(matrices, *(x.to(dtype) for x in norms), HEADS, HEAD_DIM, params)


def make_rows() -> RowPass:
    """Rows of two requests, and two padding rows that have no slot."""
    tables = torch.tensor([[3, 0], [1, 2]]).int()
    owner = torch.tensor([0, 1]).repeat_interleave(torch.tensor(COUNTS))
    positions = torch.cat(
        [first + torch.arange(count) for first, count in zip(FIRSTS, COUNTS, strict=True)]
    )
    slots = tables[owner, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    return RowPass(
        torch.cat([positions, torch.zeros(2, dtype=torch.long)]),
        torch.cat([slots, torch.tensor([-1, -1])]),
        tables,
        torch.tensor([0, COUNTS[0]]).int(),
        torch.tensor(COUNTS).int(),
        torch.tensor(FIRSTS).int(),
        max(COUNTS),
        PAGE_SIZE,
    )


def make_caches(layers: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """Keys and values of each layer."""
    return [
        [some(4 * PAGE_SIZE, 2, HEAD_DIM, seed=i + j).to(dtype) for i in range(layers)]
        for j in (30, 40)
    ]


def run_kernels(
    layer: FusedLayer,
    window: int | None,
    normed: Tensor,
    residual: Tensor,
    rows: RowPass,
    rope: Tensor,
    keys: Tensor,
    values: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run a layer kernel by kernel; return the output of its experts and the residual stream."""
    qkv, out, _, _, moe = layer.matrices
    assert moe is not None
    projected = qkv(normed)
    assert ops.rope_store(projected, rows, rope, keys, values, HEADS)
    query = projected[:, : out.k].unflatten(1, (-1, HEAD_DIM))
    attended = torch.zeros(query.shape, dtype=normed.dtype)
    params = AttentionParams(HEAD_DIM**-0.5, window, sinks=layer.sinks)
    assert ops.attend(query, keys, values, rows, params, attended)
    mlp_norm = layer.norms[1]
    assert mlp_norm is not None
    added = ops.add_norm(out(attended.flatten(1)), residual, mlp_norm, HEADS.eps, None)
    assert added is not None
    return moe(added[0]), added[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_layers_in_one_call(dtype: torch.dtype) -> None:
    windows = (None, 7)
    layers = [make_layer(50 * i, window, dtype) for i, window in enumerate(windows)]
    rows = make_rows()
    rope = some(64, HEAD_DIM)
    x = some(len(rows.positions), HIDDEN).to(dtype)
    fused = FusedLayers(layers)
    caches = make_caches(2, dtype)
    workspace = LayerWorkspace.create(rows, rope, fused.scratch_width, dtype)
    result = fused(x.clone(), workspace, *caches, (0, 1))
    assert result.x.isfinite().all() and result.x.std() > 0.1

    expected, residual = x, None
    taps: list[Tensor] = []
    plain_caches = make_caches(2, dtype)
    for layer, window, *cache in zip(layers, windows, *plain_caches, strict=True):
        assert layer.norms[0] is not None
        added = ops.add_norm(expected, residual, layer.norms[0], HEADS.eps, None)
        assert added is not None
        taps.append(added[1])
        expected, residual = run_kernels(layer, window, *added, rows, rope, *cache)
    live = slice(sum(COUNTS))
    assert torch.equal(result.x[live], expected[live])
    assert residual is not None and torch.equal(result.residual[live], residual[live])
    assert torch.equal(result.taps[live], torch.cat(taps, 1)[live])
    for one, other in zip(caches, plain_caches, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not any(torch.equal(a, b) for a, b in pairwise(caches[0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_and_windows_have_an_effect(dtype: torch.dtype) -> None:
    """The comparison above would not detect a part that both implementations omit."""
    rows = make_rows()
    rope = some(64, HEAD_DIM)
    x = some(len(rows.positions), HIDDEN).to(dtype)
    outputs: list[Tensor] = []
    for window, sinks in ((None, True), (7, True), (None, False)):
        layer = make_layer(0, window, dtype)
        if not sinks:
            layer.struct.sinks = None
        keys, values = make_caches(1, dtype)
        workspace = LayerWorkspace.create(rows, rope, layer.scratch_width, dtype)
        outputs.append(layer(x, x, workspace, keys[0], values[0])[0])
    assert all(not torch.allclose(a, b, atol=0.05) for a, b in pairwise([*outputs, outputs[0]]))
