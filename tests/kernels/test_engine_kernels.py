"""The engine's kernels against their plain references: in Triton's interpreter, and on CUDA where there is one.

Each case is a function of (device, dtype); the interpreter takes float32, CUDA takes bfloat16 too.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

pytest.importorskip("triton")

from peagle.engine.model.weight import Weight
from peagle.kernels.triton import (
    accept,
    add_norm,
    argmax,
    expand_rows,
    gather_rows,
    paged_attention,
    rope_store,
    skinny_gemm,
    swiglu,
)
from peagle.row_layout import draft_rows
from peagle.target.quantized.codes import QuantizedWeight
from tests.kernels.test_kernels import INTERPRETED, index_of_one_element, interpreted  # noqa: F401 (a fixture for every test)
from tests.support import tree_kernel_cases
from tests.support.comparing import near, some

Case = Callable[[str, torch.dtype], None]


def norms(rows: int, d: int, device: str, dtype: torch.dtype) -> None:
    wide, residual = some(rows, 2 * d).to(device, dtype), some(rows, d, seed=1).to(device, dtype)
    weight, x = some(d).to(device, dtype), wide[:, d:]  # rows apart
    for before in (residual, None):
        found, wanted = (
            add_norm.add_norm(x, before, weight, 1e-5),
            add_norm.reference(x, before, weight, 1e-5),
        )
        near(found[0], wanted[0])
        torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0)
        beside = torch.full((rows, 2 * d), 7.0, device=device, dtype=dtype)
        assert (
            add_norm.add_norm(x, before, weight, 1e-5, out=beside[:, :d])[0].data_ptr()
            == beside.data_ptr()
        )
        near(beside[:, :d], wanted[0])
        assert (beside[:, d:] == 7).all()
        shares = some(3, rows, d).to(device)  # float32, whatever the rest is
        found, wanted = (
            run(shares, before, weight, 1e-5) for run in (add_norm.add_norm, add_norm.reference)
        )
        near(found[0], wanted[0], 2)
        near(found[1], wanted[1])


def gates(rows: int, inner: int, device: str, dtype: torch.dtype) -> None:
    gate_up = (some(rows, 2 * inner) * 4).to(device, dtype)
    near(swiglu.swiglu(gate_up), swiglu.reference(gate_up))


def turns(
    heads: int, kv_heads: int, d: int, rot: int, q: bool, k: bool, device: str, dtype: torch.dtype
) -> None:
    rows, slots, width = 7, 32, (heads + 2 * kv_heads) * d
    angles = torch.arange(64)[:, None] * 0.3 ** torch.arange(rot // 2)
    table = torch.cat([angles.cos(), angles.sin()], 1).to(device) * 1.1
    positions = torch.tensor(
        [0, 5, 63, 17, 17, 40, 99], dtype=torch.int32, device=device
    )  # 99: behind the table
    to = torch.tensor([3, -1, 31, 0, 9, -1, 12], dtype=torch.int32, device=device)
    weights = [
        (some(d, seed=i) + 1).to(device, dtype) if given else None for i, given in enumerate((q, k))
    ]
    results = []
    for run in (rope_store.rope_store, rope_store.reference):
        qkv = some(rows, width).to(device, dtype)
        caches = some(2, slots, kv_heads, d).to(device, dtype)
        run(qkv, positions, to, table, caches[0], caches[1], heads, kv_heads, *weights, 1e-6)
        results.append((qkv, caches))
    near(results[0][0], results[1][0], 2)
    near(results[0][1], results[1][1], 2)
    untouched = [i for i in range(slots) if i not in to.tolist()]
    before = some(2, slots, kv_heads, d).to(device, dtype)
    assert torch.equal(results[0][1][:, untouched], before[:, untouched])
    shares, results = some(3, rows, width).to(device), []
    for run in (rope_store.rope_store, rope_store.reference):
        caches = some(2, slots, kv_heads, d).to(device, dtype)
        query = run(
            shares, positions, to, table, caches[0], caches[1], heads, kv_heads, *weights, 1e-6
        )
        results.append((query, caches))
    near(results[0][0], results[1][0], 4)
    near(results[0][1], results[1][1], 4)


def attends(
    heads: int,
    kv_heads: int,
    d: int,
    counts: list[int],
    ends: list[int],
    device: str,
    dtype: torch.dtype,
    page: int = 16,
    most: int | None = None,
    sinks: bool = False,
    **switches: float,
) -> None:
    """Rows of request b are its last counts[b] positions before ends[b]; one row of nobody lies between requests."""
    batch, pages = len(counts), -(-max(ends) // page)
    rows = torch.tensor(counts)
    starts = (rows + 1).cumsum(0) - rows  # [B]
    total = int(rows.sum()) + batch + 1
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(3))
    tables = order.view(batch, pages).int()
    caches = some(2, batch * pages * page, kv_heads, d)
    for b, end in enumerate(ends):  # what lies behind the end must not matter
        behind = torch.arange(end, pages * page)
        caches[:, tables[b, behind // page].long() * page + behind % page] = float("nan")
    query = some(total, heads + 2, d)[:, 1 : heads + 1]
    given = [x.to(device, dtype) for x in (query, caches[0], caches[1])]
    given[0] = torch.zeros(total, heads + 2, d, device=device, dtype=dtype)[:, 1 : heads + 1].copy_(
        given[0]
    )  # apart
    ints = [x.to(device, torch.int32) for x in (starts, rows, torch.tensor(ends) - rows)]
    extra = {"sinks": some(heads).to(device, dtype)} if sinks else {}
    args = (*given, tables.to(device), page, *ints, most or max(max(counts), 1), d**-0.5)
    wanted = paged_attention.reference(*args, **switches, **extra)
    assert wanted.isfinite().all()
    for splits in (None, 1, 3, 4):
        found = paged_attention.paged_attention(*args, **switches, **extra, splits=splits)
        near(found, wanted, 4)
        nobody = torch.ones(total, dtype=torch.bool)
        for start, count in zip(starts.tolist(), counts, strict=True):
            nobody[start : start + count] = False
        assert (found[nobody.to(device)] == 0).all()
    kept = paged_attention.paged_attention(
        *args, **switches, **extra, out=torch.full_like(wanted, 7.0)
    )
    assert (kept[nobody.to(device)] == 7).all()


def accepts(batch: int, k: int, device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(batch + k)
    tokens = torch.randint(0, 2, (batch, k + 1), generator=generator).to(device)
    drafts = torch.randint(0, 2, (batch, k), generator=generator).to(device)
    first = torch.randint(0, 90, (batch,), generator=generator).int().to(device)
    room = torch.randint(-1, k + 2, (batch,), generator=generator).int().to(device)
    drafts[: batch // 2] = tokens[: batch // 2, :k]  # so that some hold to the end
    index = torch.randperm(batch + 3, generator=generator)[:batch].to(device)
    tops, broken = some(batch, k + 1).to(device), torch.arange(batch, device=device) % 3 == 1
    tops[broken, k] = -torch.inf
    results = []
    for run in (accept.accept, accept.reference):
        places = [
            torch.arange(batch + 3, device=device).to(kind)
            for kind in (torch.int32, torch.int32, torch.int64)
        ]
        results.append(
            (*run(tokens, tops, drafts, first, first + 1 + room, index, *places), *places)
        )
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    found, packed, places = results[0][:2], results[0][2], results[0][3:]
    assert torch.equal(packed, torch.cat([tokens, found[0][:, None], broken[:, None]], 1))
    assert torch.equal(places[0][index], first + found[0] + (room >= 0)) and torch.equal(
        places[2][index], found[1]
    )
    for b, limit in enumerate(room.clamp(min=0).tolist()):  # the rule, once more
        kept = 0
        while kept < min(k, limit) and drafts[b, kept] == tokens[b, kept]:
            kept += 1
        assert (found[0][b], found[1][b]) == (kept, tokens[b, kept])


def expands(batch: int, width: int, k: int, d: int, device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(batch * k + d)
    vocab, mask_id, page, pages, wide = 50, 5, 4, 8, width + k - 1

    def numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    block, kept, newest = numbers(vocab, batch, width), numbers(width, batch), numbers(vocab, batch)
    block[0, -1] = newest[-1] = mask_id  # a real token may be the mask's
    first, ends = numbers(30, batch), numbers(pages * page, batch)
    tables = torch.randperm(batch * pages, generator=generator).view(batch, pages)
    hidden, embed, mask_embedding, mask_hidden = (
        some(batch * width, d),
        some(vocab, d),
        some(d),
        some(d, seed=1),
    )
    floats = [x.to(device, dtype) for x in (hidden, embed, mask_embedding, mask_hidden)]
    args = (
        block.to(device),
        kept.int().to(device),
        newest.to(device),
        first.int().to(device),
        *floats,
        mask_id,
        tables.int().to(device),
        page,
        ends.int().to(device),
        k,
    )
    found, wanted = expand_rows.expand_rows(*args), expand_rows.reference(*args)
    for name, a, b in zip(found._fields, found, wanted, strict=True):
        assert (a is b is None) or (a.dtype == b.dtype and torch.equal(a, b)), name

    starts = torch.arange(batch + 1) * width
    rows = draft_rows(block.flatten(), starts, first, width - 1 - kept, newest, k, mask_id)
    live = (torch.arange(wide) < kept[:, None] + k).flatten()
    made = expand_rows.ExpandedRows(*(x.cpu() for x in found))
    hidden, embed, mask_embedding, mask_hidden = (x.cpu() for x in floats)
    assert torch.equal(
        made.embeds[live],
        torch.where(rows.ids[:, None] == mask_id, mask_embedding, embed[rows.ids]),
    )
    assert torch.equal(
        made.hidden[live], torch.where(rows.source[:, None] < 0, mask_hidden, hidden[rows.source])
    )
    assert torch.equal(made.positions[live].long(), rows.positions)
    request = torch.arange(batch).repeat_interleave(rows.starts.diff())
    for slot, b, position in zip(
        made.slots[live].tolist(), request, rows.positions.tolist(), strict=True
    ):
        assert slot == (
            tables[b, position // page] * page + position % page if position < ends[b] else -1
        )
    assert (made.slots[~live] == -1).all()
    assert not any(x[~live].any() for x in (made.positions, made.embeds, made.hidden))
    ragged = live.cumsum(0) - 1  # padded row -> ragged row
    assert torch.equal(ragged[made.sampled], rows.sampled.flatten())
    assert torch.equal(made.starts, torch.arange(batch).int() * wide)
    assert torch.equal(made.counts.long(), rows.starts.diff())


def multiplies(
    rows: int, n: int, columns: int, bias: bool, device: str, dtype: torch.dtype
) -> None:
    dtype = torch.bfloat16 if device == "cuda" else dtype  # float32 is not for this kernel there
    wide = (some(rows, columns + 3) / columns**0.5).to(device, dtype)
    x, weight = wide[:, :columns], some(n, columns, seed=1).to(device, dtype)
    extra = some(n, seed=2).to(device, dtype) if bias else None
    shares = skinny_gemm.shares_of(weight)
    assert skinny_gemm.fits(x, weight)
    found, wanted = (
        skinny_gemm.skinny_gemm(x, weight, extra),
        skinny_gemm.reference(x, weight, extra, shares),
    )
    near(found, wanted, 4 if shares == 1 else 10)
    if skinny_gemm.fits(x, weight, 2):
        near(
            skinny_gemm.gated_skinny_gemm(x, weight),
            swiglu.reference(skinny_gemm.reference(x, weight)),
            8,
        )
    alone = torch.cat(
        [skinny_gemm.skinny_gemm(x[i : i + 1], weight, extra) for i in range(rows)], -2
    )
    if rows <= 16:
        assert torch.equal(alone, found), "a row depends on its neighbors"


def multiplies_small(
    rows: int, n: int, columns: int, small: torch.dtype, device: str, dtype: torch.dtype
) -> None:
    """A weight in 8 bits, with a scale for each of its rows."""
    dtype = torch.bfloat16 if device == "cuda" else dtype
    x, scales = (
        (some(rows, columns) / columns**0.5).to(device, dtype),
        (some(n, seed=3).abs() / 40 + 0.01).to(device),
    )
    weight, extra = (
        (40 * some(n, columns, seed=1)).to(small).to(device),
        some(n, seed=2).to(device, dtype),
    )
    shares = skinny_gemm.shares_of(weight)
    found = skinny_gemm.skinny_gemm(x, weight, extra, scales)
    near(found, skinny_gemm.reference(x, weight, extra, shares, scales), 4 if shares == 1 else 10)
    plain = skinny_gemm.reference(x, weight, scales=scales)
    near(skinny_gemm.gated_skinny_gemm(x, weight, scales), swiglu.reference(plain), 8)
    assert torch.equal(skinny_gemm.skinny_gemm(x[2:3], weight, extra, scales), found[..., 2:3, :])


def shrinks(n: int, columns: int, small: torch.dtype, device: str, dtype: torch.dtype) -> None:
    """A quantized target's weight is read by its codes: scales that no other rounding would find."""
    dtype = torch.bfloat16 if device == "cuda" else dtype
    codes = QuantizedWeight(
        (40 * some(n, columns, seed=1)).to(small), some(n, 1, seed=3).abs() / 40 + 0.01
    ).to(torch.device(device))
    weight = Weight(torch.zeros(n, columns, dtype=dtype, device=device), None, codes)
    assert weight.use_codes(min_gpu_weights=0)
    x = (some(8, columns) / columns**0.5).to(device, dtype)
    wanted = skinny_gemm.reference(x, codes.codes, scales=codes.scales[:, 0])
    near(weight.split_k(x), wanted, 4)
    near(weight.gated(x), swiglu.reference(wanted), 8)


def picks(rows: int, size: int, device: str, dtype: torch.dtype) -> None:
    logits = some(rows, 2 * size).to(device, dtype)[:, :size]
    logits[0] = float("-inf")
    logits[1, [3, size - 1]] = 99.0  # the first of equals
    logits[2, size // 2] = float("nan")
    found, wanted = argmax.argmax(logits), argmax.reference(logits)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and torch.equal(a[2:], b[2:])
    assert found[1][0] == float("-inf") and found[1][2] == float("inf") and found[0][1] == 3


def takes(batch: int, width: int, pages: int, device: str, dtype: torch.dtype) -> None:
    generator, page = torch.Generator().manual_seed(batch), 4
    places = batch + 2
    tables = torch.randperm(places * pages, generator=generator).view(places, pages).int()
    lengths = torch.randint(0, pages * page - width, (places,), generator=generator).int()
    ends = torch.randint(1, pages * page, (places,), generator=generator).int()
    newest, drafts = (
        torch.randint(0, 99, (places, *size), generator=generator) for size in ((), (9,))
    )
    index = torch.randperm(places, generator=generator)[:batch]
    given = [x.to(device) for x in (tables, lengths, ends, newest, drafts)]
    found, wanted = (
        run(index.to(device), width, page, *given)
        for run in (gather_rows.gather_rows, gather_rows.reference)
    )
    for name, a, b in zip(found._fields, found, wanted, strict=True):
        assert (a is b is None) or (a.dtype == b.dtype and torch.equal(a, b)), name


CASES: dict[str, Case] = {
    "few rows": partial(multiplies, 8, 192, 128, False),
    "few rows, shares": partial(multiplies, 15, 128, 1024, True),
    "few rows, bias": partial(multiplies, 1, 128, 192, True),
    "few rows, int8": partial(multiplies_small, 8, 256, 192, torch.int8),
    "few rows, fp8": partial(multiplies_small, 8, 256, 192, torch.float8_e4m3fn),
    "few rows, int8, shares": partial(multiplies_small, 5, 128, 1024, torch.int8),
    "a weight by its codes, int8": partial(shrinks, 256, 192, torch.int8),
    "a weight by its codes, fp8": partial(shrinks, 256, 192, torch.float8_e4m3fn),
    "few rows, many": partial(multiplies, 40, 128, 1024, False),
    "best": partial(picks, 5, 10_000),
    "best, one piece": partial(picks, 3, 77),
    "take": partial(takes, 5, 6, 7),
    "take, one row, many pages": partial(takes, 2, 1, 300),
    "add_norm": partial(norms, 5, 576),
    "add_norm, odd": partial(norms, 3, 33),
    "add_norm, no rows": partial(norms, 0, 16),
    "swiglu": partial(gates, 3, 1536),
    "swiglu, odd": partial(gates, 2, 37),
    "rope_store, GQA 3": partial(turns, 9, 3, 64, 64, False, False),
    "rope_store, head norms": partial(turns, 8, 2, 128, 128, True, True),
    "rope_store, partial": partial(turns, 5, 1, 24, 10, False, False),
    "rope_store, partial, head norms": partial(turns, 4, 2, 32, 16, True, True),
    "rope_store, k norm": partial(turns, 2, 2, 16, 16, False, True),
    "attention, verify": partial(attends, 9, 3, 64, [6, 6, 6], [6, 70, 131]),
    "attention, one row": partial(attends, 4, 1, 128, [1, 1, 0, 1], [1, 64, 9, 200]),
    "attention, ragged": partial(attends, 6, 2, 24, [3, 0, 7, 1], [3, 5, 90, 65], most=9, page=8),
    "attention, prefill": partial(attends, 6, 2, 16, [70, 40], [70, 100], page=64),
    "attention, window": partial(attends, 3, 1, 64, [5, 2, 30], [140, 2, 70], window=20),
    "attention, window of 1": partial(attends, 2, 1, 16, [4], [40], window=1),
    "attention, softcap": partial(attends, 4, 2, 16, [5, 2], [80, 2], softcap=0.7),
    "attention, sinks": partial(attends, 4, 2, 16, [5, 2], [140, 2], sinks=True),
    "attention, everything": partial(
        attends, 8, 2, 32, [5, 20], [140, 20], sinks=True, softcap=3.0, window=33
    ),
    "accept": partial(accepts, 37, 5),
    "accept, K=1": partial(accepts, 3, 1),
    "accept, K=0": partial(accepts, 3, 0),
    "expand": partial(expands, 9, 6, 5, 40),
    "expand, K=3 after 5 drafts": partial(expands, 4, 6, 3, 16),
    "expand, K=5 after no drafts": partial(expands, 4, 1, 5, 16),
    "expand, K=1": partial(expands, 6, 2, 1, 33),
    "expand, one request": partial(expands, 1, 8, 7, 64),
    **tree_kernel_cases.CASES,
}


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_in_the_interpreter() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-k",
        "interpreted",
        __file__,
    ]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0 and f"{len(CASES)} passed" in done.stdout, done.stdout + done.stderr
    assert "skipped" not in done.stdout


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_kernel_interpreted(name: str) -> None:
    CASES[name]("cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_kernel_on_cuda(name: str, dtype: torch.dtype) -> None:
    CASES[name]("cuda", dtype)


@pytest.mark.skipif(INTERPRETED, reason="needs no kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_references_are_transformers(dtype: torch.dtype) -> None:
    """Bit for bit: the norm, the rotation with and without a head norm."""
    heads, d, rows = 3, 16, 11
    config = LlamaConfig(
        hidden_size=heads * d, num_attention_heads=heads, max_position_embeddings=64
    )
    norm, head_norm = (LlamaRMSNorm(size, 1e-5).to(dtype) for size in (heads * d, d))
    norm.weight.data, head_norm.weight.data = some(heads * d).to(dtype), some(d).to(dtype)
    x, residual = some(rows, heads * d).to(dtype), some(rows, heads * d, seed=1).to(dtype)
    normed, total = add_norm.reference(x, residual, norm.weight, 1e-5)
    assert torch.equal(normed, norm(x + residual)) and torch.equal(total, x + residual)

    rope, positions = LlamaRotaryEmbedding(config), torch.arange(rows) * 5
    cos, sin = rope(torch.zeros(1), torch.arange(64)[None])
    table = torch.cat([cos[0, :, : d // 2], sin[0, :, : d // 2]], 1)
    for weight in (None, head_norm.weight):
        qkv, caches = some(rows, 3 * heads * d).to(dtype), torch.zeros(2, 32, heads, d, dtype=dtype)
        q, k, v = (part.unflatten(1, (heads, d)) for part in qkv.clone().chunk(3, 1))
        if weight is not None:
            q, k = head_norm(q), head_norm(k)
        angles = (part.to(dtype) for part in rope(torch.zeros(1), positions[None]))
        q, k = apply_rotary_pos_emb(q[None], k[None], *angles, unsqueeze_dim=2)
        to = torch.randperm(32, generator=torch.Generator().manual_seed(0))[:rows]
        rope_store.reference(
            qkv, positions, to, table, caches[0], caches[1], heads, heads, weight, weight, 1e-5
        )
        assert torch.equal(qkv[:, : heads * d].unflatten(1, (heads, d)), q[0])
        assert torch.equal(caches[0][to], k[0]) and torch.equal(caches[1][to], v)
