"""Cases of the engine's kernels, compared with references and with explicit computations.

Each case is a function of (device, dtype); Triton's interpreter takes float32, CUDA bfloat16 too.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.drafter import convolution
from peagle.engine.model.weight import Weight
from peagle.kernels.attention_params import AttentionHeads, AttentionParams
from peagle.kernels.row_pass import RowPass
from peagle.kernels.slot_state import SlotBatch, SlotState
from peagle.kernels.triton import (
    accept,
    add_norm,
    argmax,
    draw_tokens,
    expand_rows,
    gather_rows,
    skinny_gemm,
    swiglu,
    top_p,
)
from peagle.kernels.triton.attention import paged_attention, rope_store
from peagle.row_layout import draft_rows
from peagle.target.quantized.codes import QuantizedWeight
from tests.support.kernels import (
    expert_kernel_cases,
    invariant_kernel_cases,
    refinement_kernel_cases,
    rotated_kernel_cases,
    tree_kernel_cases,
)
from tests.support.kernels.comparing import near, same_fields, some
from tests.support.kernels.tree_kernel_cases import no_trees

Case = Callable[[str, torch.dtype], None]


def check_convolve_rows(rows: int, d: int, device: str, dtype: torch.dtype) -> None:
    hidden = torch.randn(rows, 2 * d, device=device, dtype=dtype)[:, :d]
    groups = torch.randn(rows, -(-d // 16), device=device, dtype=dtype)
    base = torch.randn(d, device=device, dtype=dtype)
    is_mask = torch.arange(rows, device=device)[:, None] % 3 > 0
    result = convolution.convolve_rows(hidden, groups, base, is_mask)
    expected = convolution.reference(hidden, groups, base, is_mask)
    rtol = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(result, expected, rtol=rtol, atol=1e-5)
    assert not rows or (result.any() and not result[::3].any())


def check_add_norm(rows: int, d: int, device: str, dtype: torch.dtype) -> None:
    x = some(rows, 2 * d).to(device, dtype)[:, d:]  # rows apart
    residual = some(rows, d, seed=1).to(device, dtype)
    weight = some(d).to(device, dtype)
    for before in (residual, None):
        result = add_norm.add_norm(x, before, weight, 1e-5)
        expected = add_norm.reference(x, before, weight, 1e-5)
        near(result[0], expected[0])
        torch.testing.assert_close(result[1], expected[1], rtol=0, atol=0)
        wide = torch.full((rows, 2 * d), 7.0, device=device, dtype=dtype)
        normed, _ = add_norm.add_norm(x, before, weight, 1e-5, out=wide[:, :d])
        assert normed.data_ptr() == wide.data_ptr()
        near(wide[:, :d], expected[0])
        assert (wide[:, d:] == 7).all()
        partial_sums = some(3, rows, d).to(device)  # float32 for any dtype
        result = add_norm.add_norm(partial_sums, before, weight, 1e-5)
        expected = add_norm.reference(partial_sums, before, weight, 1e-5)
        near(result[0], expected[0], 2)
        near(result[1], expected[1])


def check_swiglu(rows: int, inner: int, device: str, dtype: torch.dtype) -> None:
    gate_up = (some(rows, 2 * inner) * 4).to(device, dtype)
    near(swiglu.swiglu(gate_up), swiglu.reference(gate_up))


def rope_rows(positions: Tensor, kv_slots: Tensor) -> RowPass:
    """A pass with the positions and slots that rope_store reads."""
    nothing = torch.zeros(1, dtype=torch.int32)
    return RowPass(positions, kv_slots, nothing[None], nothing, nothing, nothing, 1, 1)


def check_rope_store(
    heads: int, kv_heads: int, d: int, rot: int, q: bool, k: bool, device: str, dtype: torch.dtype
) -> None:
    row_count = 7
    slots = 32
    width = (heads + 2 * kv_heads) * d
    angles = torch.arange(64)[:, None] * 0.3 ** torch.arange(rot // 2)
    table = torch.cat([angles.cos(), angles.sin()], 1).to(device) * 1.1
    # Position 99 is beyond the table.
    positions = torch.tensor([0, 5, 63, 17, 17, 40, 99], dtype=torch.int32, device=device)
    kv_slots = torch.tensor([3, -1, 31, 0, 9, -1, 12], dtype=torch.int32, device=device)
    q_norm = (some(d, seed=0) + 1).to(device, dtype) if q else None
    k_norm = (some(d, seed=1) + 1).to(device, dtype) if k else None
    layer_heads = AttentionHeads(heads, kv_heads, q_norm, k_norm, 1e-6)
    results = []
    for run in (rope_store.rope_store, rope_store.reference):
        qkv = some(row_count, width).to(device, dtype)
        caches = some(2, slots, kv_heads, d).to(device, dtype)
        run(qkv, rope_rows(positions, kv_slots), table, caches[0], caches[1], layer_heads)
        results.append((qkv, caches))
    near(results[0][0], results[1][0], 2)
    near(results[0][1], results[1][1], 2)
    untouched = [i for i in range(slots) if i not in kv_slots.tolist()]
    before = some(2, slots, kv_heads, d).to(device, dtype)
    assert torch.equal(results[0][1][:, untouched], before[:, untouched])
    partial_sums = some(3, row_count, width).to(device)
    results = []
    for run in (rope_store.rope_store, rope_store.reference):
        caches = some(2, slots, kv_heads, d).to(device, dtype)
        rows = rope_rows(positions, kv_slots)
        query = run(partial_sums, rows, table, caches[0], caches[1], layer_heads)
        results.append((query, caches))
    near(results[0][0], results[1][0], 4)
    near(results[0][1], results[1][1], 4)


def check_attention(
    heads: int,
    kv_heads: int,
    d: int,
    counts: list[int],
    ends: list[int],
    device: str,
    dtype: torch.dtype,
    page_size: int = 16,
    max_rows: int | None = None,
    sinks: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """The rows of request b are its last counts[b] positions before ends[b].

    Rows of no request are before, between and after the requests.
    """
    batch = len(counts)
    pages = -(-max(ends) // page_size)
    row_counts = torch.tensor(counts)
    starts = (row_counts + 1).cumsum(0) - row_counts  # [B]
    total = int(row_counts.sum()) + batch + 1
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(3))
    tables = order.view(batch, pages).int()
    caches = some(2, batch * pages * page_size, kv_heads, d)
    for b, end in enumerate(ends):  # Values after the end must have no effect.
        after = torch.arange(end, pages * page_size)
        slots = tables[b, after // page_size].long() * page_size + after % page_size
        caches[:, slots] = float("nan")
    wide_query = some(total, heads + 2, d)[:, 1 : heads + 1].to(device, dtype)
    query = torch.zeros(total, heads + 2, d, device=device, dtype=dtype)[:, 1 : heads + 1]
    query.copy_(wide_query)  # rows apart
    key_cache, value_cache = (x.to(device, dtype) for x in (caches[0], caches[1]))
    rows = RowPass(
        torch.zeros(total, dtype=torch.long, device=device),
        torch.full((total,), -1, device=device),
        tables.to(device),
        starts.to(device, torch.int32),
        row_counts.to(device, torch.int32),
        (torch.tensor(ends) - row_counts).to(device, torch.int32),
        max_rows or max(max(counts), 1),
        page_size,
    )
    sink_scores = some(heads).to(device, dtype) if sinks else None
    args = (query, key_cache, value_cache, rows)
    params = AttentionParams(d**-0.5, window, softcap, sink_scores)
    expected = paged_attention.reference(*args, params)
    assert expected.isfinite().all()
    padding = torch.ones(total, dtype=torch.bool)
    for start, count in zip(starts.tolist(), counts, strict=True):
        padding[start : start + count] = False
    padding = padding.to(device)
    # In the interpreter, test_decode_attention.py has the usual number of splits.
    for splits in (1, 3, 4) if device == "cuda" else (3,):
        result = paged_attention.paged_attention(*args, params, splits=splits)
        near(result, expected, 4)
        assert (result[padding] == 0).all()
    filled = torch.full_like(expected, 7.0)
    usual_splits = None if device == "cuda" else 1
    paged_attention.paged_attention(*args, params, out=filled, splits=usual_splits)
    near(filled[~padding], expected[~padding], 4)
    assert (filled[padding] == 7).all()


def slot_state(count: int, device: str) -> SlotState:
    """Slots with distinct values."""
    numbers = torch.arange(count, device=device)
    tables = torch.zeros(count, 1, dtype=torch.int32, device=device)
    return SlotState(tables, numbers.int(), numbers.int(), numbers.int(), numbers.clone())


def check_accept(batch: int, k: int, device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(batch + k)
    tokens = torch.randint(0, 2, (batch, k + 1), generator=generator).to(device)
    drafts = torch.randint(0, 2, (batch, k), generator=generator).to(device)
    first = torch.randint(0, 90, (batch,), generator=generator).int().to(device)
    room = torch.randint(-1, k + 2, (batch,), generator=generator).int().to(device)
    drafts[: batch // 2] = tokens[: batch // 2, :k]  # In some, all drafts are accepted.
    index = torch.randperm(batch + 3, generator=generator)[:batch].to(device)
    top_logits = some(batch, k + 1).to(device)
    broken = torch.arange(batch, device=device) % 3 == 1
    top_logits[broken, k] = -torch.inf
    slots = SlotBatch(index, first, first + 1 + room)
    state, expected_state = slot_state(batch + 3, device), slot_state(batch + 3, device)
    result = accept.accept(tokens, top_logits, drafts, slots, state)
    expected = accept.reference(tokens, top_logits, drafts, slots, expected_state)
    same_fields(result, expected)
    same_fields(state, expected_state)
    accepted, newest, packed = result
    assert torch.equal(packed, torch.cat([tokens, accepted[:, None], broken[:, None]], 1))
    assert torch.equal(state.lengths[index], first + accepted + (room >= 0))
    assert torch.equal(state.newest[index], newest)
    for b, limit in enumerate(
        room.clamp(min=0).tolist()
    ):  # The expected values, computed step by step.
        count = 0
        while count < min(k, limit) and drafts[b, count] == tokens[b, count]:
            count += 1
        assert (accepted[b], newest[b]) == (count, tokens[b, count])


def check_expand_rows(
    batch: int, width: int, k: int, d: int, device: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(batch * k + d)
    vocab, mask_id, page_size, pages = 50, 5, 4, 8
    padded_width = width + k - 1

    def numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    ids, accepted, newest = (
        numbers(vocab, batch, width),
        numbers(width, batch),
        numbers(vocab, batch),
    )
    ids[0, -1] = newest[-1] = mask_id  # a real token may have the mask's id
    first, ends = numbers(30, batch), numbers(pages * page_size, batch)
    tables = torch.randperm(batch * pages, generator=generator).view(batch, pages)
    drawn = some(batch * width, d), some(vocab, d), some(d), some(d, seed=1)
    hidden, embed, mask_embedding, mask_hidden = (x.to(device, dtype) for x in drawn)
    block = expand_rows.VerifiedBlock(
        ids.to(device),
        hidden,
        first.int().to(device),
        accepted.int().to(device),
        newest.to(device),
        tables.int().to(device),
        ends.int().to(device),
    )
    inputs = expand_rows.DrafterInputs(embed, mask_embedding, mask_hidden, mask_id)
    result = expand_rows.expand_rows(block, inputs, page_size, k)
    same_fields(result, expand_rows.reference(block, inputs, page_size, k))

    starts = torch.arange(batch + 1) * width
    rows = draft_rows(ids.flatten(), starts, first, width - 1 - accepted, newest, k, mask_id)
    live = (torch.arange(padded_width) < accepted[:, None] + k).flatten()
    result = expand_rows.ExpandedRows(*(x.cpu() for x in result))
    hidden, embed, mask_embedding, mask_hidden = (
        x.cpu() for x in (hidden, embed, mask_embedding, mask_hidden)
    )
    embeds = torch.where(rows.ids[:, None] == mask_id, mask_embedding, embed[rows.ids])
    assert torch.equal(result.embeds[live], embeds)
    states = torch.where(rows.source[:, None] < 0, mask_hidden, hidden[rows.source])
    assert torch.equal(result.hidden[live], states)
    assert torch.equal(result.positions[live].long(), rows.positions)
    request = torch.arange(batch).repeat_interleave(rows.starts.diff())
    live_slots = result.kv_slots[live].tolist()
    for slot, b, position in zip(live_slots, request, rows.positions.tolist(), strict=True):
        if position < ends[b]:
            page = tables[b, position // page_size]
            assert slot == page * page_size + position % page_size
        else:
            assert slot == -1
    assert (result.kv_slots[~live] == -1).all()
    assert not any(x[~live].any() for x in (result.positions, result.embeds, result.hidden))
    ragged = live.cumsum(0) - 1  # padded row -> ragged row
    assert torch.equal(ragged[result.draft_rows], rows.sampled.flatten())
    assert torch.equal(result.row_starts, torch.arange(batch).int() * padded_width)
    assert torch.equal(result.row_counts.long(), rows.starts.diff())


def check_skinny_gemm(
    rows: int, n: int, columns: int, bias: bool, device: str, dtype: torch.dtype
) -> None:
    dtype = torch.bfloat16 if device == "cuda" else dtype  # the kernel is not for float32 there
    x = (some(rows, columns + 3) / columns**0.5).to(device, dtype)[:, :columns]
    weight = some(n, columns, seed=1).to(device, dtype)
    extra = some(n, seed=2).to(device, dtype) if bias else None
    splits = skinny_gemm.num_splits(weight)
    assert skinny_gemm.supports_skinny_gemm(x, weight)
    result = skinny_gemm.skinny_gemm(x, weight, extra)
    near(result, skinny_gemm.reference(x, weight, extra, splits), 4 if splits == 1 else 10)
    if skinny_gemm.supports_skinny_gemm(x, weight, gated=True):
        expected = swiglu.reference(skinny_gemm.reference(x, weight))
        near(skinny_gemm.gated_skinny_gemm(x, weight), expected, 8)
    if rows <= 16:
        for i in {0, rows // 2, rows - 1}:
            single = skinny_gemm.skinny_gemm(x[i : i + 1], weight, extra)
            assert torch.equal(single, result[..., i : i + 1, :]), "a row depends on other rows"


def check_skinny_gemm_8bit(
    rows: int, n: int, columns: int, weight_dtype: torch.dtype, device: str, dtype: torch.dtype
) -> None:
    """A weight in 8 bits, with a scale for each of its rows."""
    dtype = torch.bfloat16 if device == "cuda" else dtype
    x = (some(rows, columns) / columns**0.5).to(device, dtype)
    scales = (some(n, seed=3).abs() / 40 + 0.01).to(device)
    weight = (40 * some(n, columns, seed=1)).to(weight_dtype).to(device)
    bias = some(n, seed=2).to(device, dtype)
    splits = skinny_gemm.num_splits(weight)
    result = skinny_gemm.skinny_gemm(x, weight, bias, scales)
    expected = skinny_gemm.reference(x, weight, bias, splits, scales)
    near(result, expected, 4 if splits == 1 else 10)
    plain = skinny_gemm.reference(x, weight, scales=scales)
    near(skinny_gemm.gated_skinny_gemm(x, weight, scales), swiglu.reference(plain), 8)
    single = skinny_gemm.skinny_gemm(x[2:3], weight, bias, scales)
    assert torch.equal(single, result[..., 2:3, :])


def check_weight_codes(
    n: int, columns: int, weight_dtype: torch.dtype, device: str, dtype: torch.dtype
) -> None:
    """The codes of a quantized weight are read; its scales rule out another rounding."""
    dtype = torch.bfloat16 if device == "cuda" else dtype
    codes = QuantizedWeight(
        (40 * some(n, columns, seed=1)).to(weight_dtype), some(n, 1, seed=3).abs() / 40 + 0.01
    ).to(torch.device(device))
    # Not exact in bf16, so that a CPU uses the interpreter and no packed matrix.
    unused = torch.full((n, columns), 0.1, dtype=dtype, device=device)
    weight = Weight(unused, None, codes)
    assert weight.use_codes(min_gpu_weights=0)
    x = (some(8, columns) / columns**0.5).to(device, dtype)
    expected = skinny_gemm.reference(x, codes.codes, scales=codes.scales[:, 0])
    near(weight.split_k(x), expected, 4)
    near(weight.gated(x), swiglu.reference(expected), 8)


def check_draw_tokens(rows: int, size: int, device: str, dtype: torch.dtype) -> None:
    """Rows with one likely token, with equal ones, and with tokens of probability 0 at the ends."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(rows, size, generator=generator)
    logits[0, size // 2] = 40.0
    logits[1] = 0.0
    logits[2, : size // 3] = logits[2, -size // 3 :] = -torch.inf
    probabilities = logits.softmax(-1).to(device)
    for uniform in (0.0, 0.3, 0.7, 1 - 2.0**-53):
        uniforms = torch.full((rows,), uniform, dtype=torch.float64, device=device)
        uniforms[3:] = torch.rand(rows - 3, dtype=torch.float64, generator=generator).to(device)
        ids = draw_tokens.draw_tokens(probabilities, uniforms)
        assert torch.equal(ids, draw_tokens.reference(probabilities, uniforms))
        assert (probabilities.gather(1, ids[:, None]) > 0).all()


def check_top_p(rows: int, size: int, device: str, dtype: torch.dtype) -> None:
    """Random rows, few different logits, rows with -inf, zeros of both signs, a single token."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(rows, size, generator=generator)
    logits[1] = torch.randint(0, 3, (size,), generator=generator).float()
    logits[2, ::3] = -torch.inf
    logits[3] = torch.where(torch.arange(size) % 2 == 0, 0.0, -0.0)
    logits[4] = -torch.inf
    logits[4, size // 2] = -5.0
    logits = logits.to(device)
    for p in (0.0, 0.3, 0.9, 0.999):
        tails = torch.full((rows,), 1 - p, dtype=torch.float64, device=device)
        kept = top_p.top_p(logits, tails).isfinite()
        assert torch.equal(kept, top_p.reference(logits, tails).isfinite())
        share = logits.softmax(-1).where(kept, 0.0).sum(-1)
        assert kept.any(-1).all() and (share > p - 1e-5).all()


def check_argmax(rows: int, size: int, device: str, dtype: torch.dtype) -> None:
    logits = some(rows, 2 * size).to(device, dtype)[:, :size]
    logits[0] = float("-inf")
    logits[1, [3, size - 1]] = 99.0  # the first of equals counts
    logits[2, size // 2] = float("nan")
    ids, tops = argmax.argmax(logits)
    expected_ids, expected_tops = argmax.reference(logits)
    same_fields((ids[2:], tops[2:]), (expected_ids[2:], expected_tops[2:]))
    assert tops[0] == float("-inf") and tops[2] == float("inf") and ids[1] == 3


def check_gather_rows(batch: int, k: int, pages: int, device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(batch)
    page_size = 4
    slots = batch + 2
    tables = torch.randperm(slots * pages, generator=generator).view(slots, pages).int()
    lengths = torch.randint(0, pages * page_size - k - 1, (slots,), generator=generator).int()
    ends = torch.randint(1, pages * page_size, (slots,), generator=generator).int()
    newest, drafts = (
        torch.randint(0, 99, (slots, *size), generator=generator) for size in ((), (9,))
    )
    index = torch.randperm(slots, generator=generator)[:batch].to(device)
    state = SlotState(*(x.to(device) for x in (tables, lengths, ends, lengths, newest)))
    trees = no_trees(slots, 9, 0, device)._replace(chain=drafts.to(device))
    result = gather_rows.gather_rows(index, DraftShape(k, k), page_size, state, trees)
    same_fields(result, gather_rows.reference(index, DraftShape(k, k), page_size, state, trees))


CASES: dict[str, Case] = {
    "few rows": partial(check_skinny_gemm, 8, 192, 128, False),
    "few rows, shares": partial(check_skinny_gemm, 15, 128, 1024, True),
    "few rows, bias": partial(check_skinny_gemm, 1, 128, 192, True),
    "few rows, int8": partial(check_skinny_gemm_8bit, 8, 256, 192, torch.int8),
    "few rows, fp8": partial(check_skinny_gemm_8bit, 8, 256, 192, torch.float8_e4m3fn),
    "few rows, int8, shares": partial(check_skinny_gemm_8bit, 5, 128, 1024, torch.int8),
    "a weight by its codes, int8": partial(check_weight_codes, 256, 192, torch.int8),
    "a weight by its codes, fp8": partial(check_weight_codes, 256, 192, torch.float8_e4m3fn),
    "few rows, many": partial(check_skinny_gemm, 40, 128, 1024, False),
    "few rows, many, bias": partial(check_skinny_gemm, 33, 192, 1088, True),
    "few rows, many, shares": partial(check_skinny_gemm, 64, 64, 1536, True),
    "best": partial(check_argmax, 5, 10_000),
    "best, one piece": partial(check_argmax, 3, 77),
    "top p": partial(check_top_p, 6, 5_000),
    "top p, one piece": partial(check_top_p, 6, 77),
    "drawn tokens": partial(check_draw_tokens, 7, 10_000),
    "drawn tokens, one piece": partial(check_draw_tokens, 4, 77),
    "drawn tokens, whole pieces": partial(check_draw_tokens, 4, 8192),
    "take": partial(check_gather_rows, 5, 5, 7),
    "take, one row, many pages": partial(check_gather_rows, 2, 0, 300),
    "convolve_rows": partial(check_convolve_rows, 9, 576),
    "convolve_rows, odd": partial(check_convolve_rows, 5, 33),
    "convolve_rows, no rows": partial(check_convolve_rows, 0, 32),
    "add_norm": partial(check_add_norm, 5, 576),
    "add_norm, odd": partial(check_add_norm, 3, 33),
    "add_norm, no rows": partial(check_add_norm, 0, 16),
    "swiglu": partial(check_swiglu, 3, 1536),
    "swiglu, odd": partial(check_swiglu, 2, 37),
    "rope_store, GQA 3": partial(check_rope_store, 9, 3, 64, 64, False, False),
    "rope_store, head norms": partial(check_rope_store, 8, 2, 128, 128, True, True),
    "rope_store, partial": partial(check_rope_store, 5, 1, 24, 10, False, False),
    "rope_store, partial, head norms": partial(check_rope_store, 4, 2, 32, 16, True, True),
    "rope_store, k norm": partial(check_rope_store, 2, 2, 16, 16, False, True),
    "attention, verify": partial(check_attention, 9, 3, 64, [6, 6, 6], [6, 70, 131]),
    "attention, one row": partial(check_attention, 4, 1, 128, [1, 1, 0, 1], [1, 64, 9, 200]),
    "attention, ragged": partial(
        check_attention, 6, 2, 24, [3, 0, 7, 1], [3, 5, 90, 65], max_rows=9, page_size=8
    ),
    "attention, prefill": partial(check_attention, 6, 2, 16, [34, 20], [34, 80], page_size=64),
    "attention, window": partial(check_attention, 3, 1, 64, [5, 2, 30], [140, 2, 70], window=20),
    "attention, window of 1": partial(check_attention, 2, 1, 16, [4], [40], window=1),
    "attention, softcap": partial(check_attention, 4, 2, 16, [5, 2], [80, 2], softcap=0.7),
    "attention, sinks": partial(check_attention, 4, 2, 16, [5, 2], [140, 2], sinks=True),
    "attention, everything": partial(
        check_attention, 8, 2, 32, [5, 20], [140, 20], sinks=True, softcap=3.0, window=33
    ),
    "accept": partial(check_accept, 37, 5),
    "accept, K=1": partial(check_accept, 3, 1),
    "accept, K=0": partial(check_accept, 3, 0),
    "expand": partial(check_expand_rows, 9, 6, 5, 40),
    "expand, K=3 after 5 drafts": partial(check_expand_rows, 4, 6, 3, 16),
    "expand, K=5 after no drafts": partial(check_expand_rows, 4, 1, 5, 16),
    "expand, K=1": partial(check_expand_rows, 6, 2, 1, 33),
    "expand, one request": partial(check_expand_rows, 1, 8, 7, 64),
    **tree_kernel_cases.CASES,
    **expert_kernel_cases.CASES,
    **invariant_kernel_cases.CASES,
    **refinement_kernel_cases.CASES,
    **rotated_kernel_cases.CASES,
}
