"""The gradients of a pack do not depend on its segments, and equal those of a dense computation."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    linear,
    scaled_dot_product_attention,
)

from peagle.core import Method
from peagle.drafter import Drafter
from peagle.drafter.model import causal_attend
from peagle.train.data.chains import Chains, sample_chains
from peagle.train.data.pack import BatchLayout, PackedDocuments, build_batch, pack_sequences
from peagle.train.features.teacher import PackFeatures
from peagle.train.objective.gradients import pack_gradients
from peagle.train.objective.length_objective import TREE_THRESHOLD, TREE_WIDTH
from peagle.train.objective.loss import Loss
from peagle.train.objective.passes import DrafterPasses
from tests.support.models.tiny_models import make_drafter, make_target
from tests.support.train.training import EXTENSIONS, row_losses, some_features, some_pack

K = 5
TARGET = make_target()
METHODS: list[Method] = ["p-eagle", "eagle3"]
SHORT = ((14, 4), (1, 0), (3, 0), (18, 9), (2, 0))  # for the slow reference
OPTIONS = {
    "kl": ("kl", 1.0, 1.0, 0.0),
    "ce, lighter with depth": ("ce", 0.0, 0.6, 0.0),
    "mix, soft-capped": ("mix", 0.3, 1.0, 2.0),
    "tvmix": ("tvmix", 0.9, 1.0, 0.0),
    "length": ("length", 0.7, 1.0, 0.0),
    "length alone": ("length", 1.0, 1.0, 0.0),
    "dpace": ("dpace", 0.4, 1.0, 0.0),
    "lk": ("lk", 0.9, 1.0, 0.0),
    "tree": ("tree", 0.7, 1.0, 0.0),
    "tree alone, lighter with depth": ("tree", 1.0, 0.8, 0.0),
}

Gradients = dict[str, Tensor]


def random_drafter(
    method: Method, layers: int = 2, draft_vocab: int | None = None, **switches: int | bool
) -> Drafter:
    """A drafter whose weights are nonzero, and large enough for attention to matter."""
    drafter = make_drafter(TARGET, method, layers, draft_vocab, **switches)
    for parameter in drafter.parameters():
        if not parameter.any():
            parameter.data.normal_(std=0.02, generator=torch.Generator().manual_seed(4))
        if parameter.ndim == 2:
            parameter.data.mul_(6)
    return drafter.requires_grad_(True)


def gradients(
    drafter: Drafter,
    packed: PackedDocuments,
    features: PackFeatures,
    segments: int = 1,
    options: str = "kl",
    level_sizes: tuple[int, ...] | None = None,
    passes: DrafterPasses | None = None,
    on_policy: float = 0.0,
) -> Gradients:
    drafter.zero_grad()
    by_depth = drafter.config.method != "p-eagle"
    layout = BatchLayout(
        by_depth, segments, level_sizes, bidirectional=drafter.config.bidirectional
    )
    batch = build_batch(packed, some_chains(packed, drafter), layout)
    loss = Loss(drafter.lm_head, K, *OPTIONS[options], on_policy=on_policy)
    pack_gradients(
        passes or DrafterPasses(drafter), batch, features, loss, 1 / batch.num_supervised
    )
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.requires_grad}


def some_chains(packed: PackedDocuments, drafter: Drafter) -> Chains:
    """Random chains; some anchors have none."""
    rng = np.random.default_rng(1)
    chains = sample_chains(
        packed.max_chain_lengths,
        K,
        0.8,
        rng,
        max_anchors=int(0.8 * (packed.max_chain_lengths > 0).sum()),
    )
    return chains.drop_corrections(0.3, rng) if drafter.config.dependency else chains


def right_before(anchor: np.ndarray, depth: np.ndarray, right: Tensor) -> Tensor:
    """[R]: 1 if all earlier rows of the same chain are right, else 0."""
    known = {(int(a), int(d)): bool(ok) for a, d, ok in zip(anchor, depth, right, strict=True)}
    rows = zip(anchor.tolist(), depth.tolist(), strict=True)
    return torch.tensor([float(all(known[a, before] for before in range(d))) for a, d in rows])


def reference(
    drafter: Drafter,
    packed: PackedDocuments,
    features: PackFeatures,
    options: str,
    on_policy: float = 0.0,
) -> Gradients:
    """Autograd through full logits of every row, without segments, chunks and a KV cache."""
    drafter.zero_grad()
    g, last = features
    chains, supervised = some_chains(packed, drafter), np.flatnonzero(packed.max_chain_lengths)
    anchor = np.concatenate([supervised, chains.anchor])
    depth = np.concatenate([np.zeros_like(supervised), chains.depth])
    run = dense_rows if drafter.config.method == "p-eagle" else unrolled_rows
    states = refined_states(drafter, packed, run(drafter, packed, g, anchor, depth), anchor, depth)
    normed = states.pop()
    if drafter.dependency is not None:
        corrected = np.concatenate([np.zeros_like(supervised), chains.corrected]).nonzero()[0]
        previous = torch.from_numpy(packed.ids[(anchor + depth + 1)[corrected]])
        rows = drafter.dependency(normed[corrected], drafter.embed(previous))
        normed = normed.index_copy(0, torch.from_numpy(corrected), rows)
    kind, mix, weight, softcap = OPTIONS[options]
    if kind == "length":
        ce = row_losses(normed, last[anchor + depth + 1], drafter.lm_head, "ce", 0.0, softcap)
        objective = (1 - mix) * ce.sum() - mix * expected_lengths(anchor, depth, (-ce).exp())
    elif kind == "dpace":
        ce = row_losses(normed, last[anchor + depth + 1], drafter.lm_head, "ce", 0.0, softcap)
        log_q = (mix + (1 - mix) * (-ce.detach()).exp()).log().requires_grad_()
        [weights] = torch.autograd.grad(expected_lengths(anchor, depth, log_q.exp()), log_q)
        objective = (weights * ce).sum()
    elif kind == "tree":
        ce = row_losses(normed, last[anchor + depth + 1], drafter.lm_head, "ce", 0.0, softcap)
        weighted = weight ** torch.from_numpy(depth) * (ce - ce.detach()) + ce.detach()
        objective = (1 - mix) * weighted.sum() - mix * expected_nodes(anchor, depth, -weighted)
    else:
        losses = row_losses(normed, last[anchor + depth + 1], drafter.lm_head, kind, mix, softcap)
        if on_policy:
            right = [
                linear(x, drafter.lm_head).argmax(-1) for x in (normed, last[anchor + depth + 1])
            ]
            losses = losses * anchor_weights(anchor, depth, right[0] == right[1], on_policy)
        if states:
            teacher = last[anchor + depth + 1]
            losses = mean_over_passes(drafter, [*states, normed], teacher, anchor, depth, kind, mix)
        objective = (losses * weight ** torch.from_numpy(depth)).sum()
    if drafter.confidence is not None:
        best, expected = (
            linear(x.detach(), drafter.lm_head).argmax(-1)
            for x in (normed, last[anchor + depth + 1])
        )
        sure = linear(normed.detach(), drafter.lm_head).log_softmax(-1).amax(-1)
        confidence = (
            drafter.confidence(normed.detach())[:, 0] + (sure.exp() / (1 - sure.exp())).log()
        )
        binary_cross_entropy_with_logits(
            confidence, (best == expected).float(), right_before(anchor, depth, best == expected)
        ).backward()
    objective.div(len(depth)).backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters()}


def expected_lengths(anchor: np.ndarray, depth: np.ndarray, q: Tensor) -> Tensor:
    """The sum of q_0 + q_0 q_1 + ... over the chains of all anchors."""
    row = {pair: i for i, pair in enumerate(zip(anchor.tolist(), depth.tolist(), strict=True))}
    total = torch.zeros(())
    for a in sorted(set(anchor.tolist())):
        reached, d = torch.ones(()), 0
        while (a, d) in row:
            reached = reached * q[row[a, d]]
            total, d = total + reached, d + 1
    return total


def expected_nodes(anchor: np.ndarray, depth: np.ndarray, log_q: Tensor) -> Tensor:
    """The soft count of the prefixes that a tree keeps, over the chains of all anchors."""
    row = {pair: i for i, pair in enumerate(zip(anchor.tolist(), depth.tolist(), strict=True))}
    total = torch.zeros(())
    for a in sorted(set(anchor.tolist())):
        path, d = torch.zeros(()), 0
        while (a, d) in row:
            path = path + log_q[row[a, d]]
            total, d = total + torch.sigmoid((path - TREE_THRESHOLD) / TREE_WIDTH), d + 1
    return total


def anchor_weights(
    anchor: np.ndarray, depth: np.ndarray, right: Tensor, on_policy: float
) -> Tensor:
    """1 - on_policy after a depth-0 row that is right, else 1; normalized to a mean of 1."""
    first = {int(a): bool(ok) for a, d, ok in zip(anchor, depth, right, strict=True) if d == 0}
    weight = {a: 1 - on_policy * first.get(a - 1, False) for a in first}
    mean = sum(weight.values()) / len(weight)
    return torch.tensor([weight[a] / mean for a in anchor.tolist()])


def dense_rows(
    drafter: Drafter, packed: PackedDocuments, g: Tensor, anchor: np.ndarray, depth: np.ndarray
) -> Tensor:
    """P-EAGLE: all rows in one pass; rows of depth 0, at every position, come first."""
    size, deeper = len(packed.ids), depth > 0
    a = torch.from_numpy(np.concatenate([np.arange(size), anchor[deeper]]))
    d = torch.from_numpy(np.concatenate([np.zeros(size, dtype=np.int64), depth[deeper]]))
    doc, position = (torch.from_numpy(x)[a] for x in (packed.doc, packed.position))
    block = drafter.config.bidirectional & (d[:, None] >= 1)
    allowed = ((d == 0) & (a <= a[:, None])) | ((a == a[:, None]) & ((d <= d[:, None]) | block))
    allowed &= doc == doc[:, None]
    more = int(deeper.sum())
    embeds = torch.cat(
        [drafter.embed(torch.from_numpy(np.append(packed.ids[1:], 0))), mask_rows(drafter, more)]
    )
    hidden = drafter.combine_hidden_states(torch.cat([g, drafter.mask_hidden.expand(more, -1)]))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)[
            0
        ].transpose(0, 1)

    before = torch.where(d > 1, torch.arange(len(d)) - 1, a)

    def previous(layer: int, rows: Tensor) -> Tensor:
        return rows[before] * (d > 0)[:, None]

    normed, _ = drafter(embeds, hidden, position + d, attend, previous)
    return normed[torch.from_numpy(np.concatenate([anchor[~deeper], size + np.arange(more)]))]


def refined_states(
    drafter: Drafter, packed: PackedDocuments, normed: Tensor, anchor: np.ndarray, depth: np.ndarray
) -> list[Tensor]:
    """The rows of every pass of a refinement, block by block; one pass without a refinement.

    Blocks of even anchors are fed real tokens, the others the drafts of the pass before.
    """
    blocks: dict[int, list[int]] = {}
    for i in np.lexsort((depth, anchor)).tolist():
        blocks.setdefault(int(anchor[i]), []).append(i)
    states = [normed]
    for _ in range(drafter.config.refinement):
        drafts = drafter.greedy_token_ids(states[-1])
        refined = torch.zeros_like(normed)
        for a, rows in blocks.items():
            fed = torch.from_numpy(packed.ids[a + 1 : a + 1 + len(rows)]).clone()
            if a % 2:
                fed[1:] = drafts[rows[:-1]]
            row_depth = torch.arange(len(rows))
            block = drafter.refine_rows(normed[rows], fed, row_depth, causal_attend)
            refined = refined.index_copy(0, torch.tensor(rows), block)
        states.append(refined)
    return states


def mean_over_passes(
    drafter: Drafter,
    states: list[Tensor],
    teacher: Tensor,
    anchor: np.ndarray,
    depth: np.ndarray,
    kind: str,
    mix: float,
) -> Tensor:
    """[R]: the mean of the losses of all passes; rows that are fed drafts
    have a loss in later passes only if all drafts before them are right.
    """
    head = drafter.lm_head
    total = row_losses(states[0], teacher, head, kind, mix)
    for state in states[1:]:
        right = linear(state, head).argmax(-1) == linear(teacher, head).argmax(-1)
        counts = torch.from_numpy(anchor % 2 == 0) | right_before(anchor, depth, right).bool()
        total = total + counts * row_losses(state, teacher, head, kind, mix)
    return total / len(states)


def mask_rows(drafter: Drafter, rows: int) -> Tensor:
    return drafter.embed(torch.full((rows,), drafter.config.mask_token_id))


def unrolled_rows(
    drafter: Drafter, packed: PackedDocuments, g: Tensor, anchor: np.ndarray, depth: np.ndarray
) -> Tensor:
    """EAGLE-3: every chain by itself, as in the decoding loop, but fed the real next tokens."""
    out: dict[tuple[int, int], Tensor] = {}
    expected = set(zip(anchor.tolist(), depth.tolist(), strict=True))
    ids = torch.from_numpy(packed.ids)
    for a in sorted({a for a, _ in expected}):
        start = int(packed.doc_start[a])
        hidden, d = drafter.combine_hidden_states(g[start : a + 1]), 0
        while (a, d) in expected:
            rows = drafter.embed(ids[start + 1 : a + 2 + d])
            normed, feedback = drafter(rows, hidden, torch.arange(len(rows)), causal_attend)
            out[a, d] = normed[-1]
            hidden, d = torch.cat([hidden, feedback[-1:]]), d + 1
    return torch.stack([out[pair] for pair in zip(anchor.tolist(), depth.tolist(), strict=True)])


def assert_same(mine: Gradients, theirs: Gradients, tolerance: float = 1e-5) -> None:
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 0, f"{name} has no gradient, so the comparison proves nothing"
        torch.testing.assert_close(
            mine[name], gradient, rtol=tolerance, atol=tolerance * float(gradient.abs().max())
        )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_segments_do_not_change_gradients(method: Method, checkpointing: bool):
    drafter, packed = random_drafter(method), some_pack()
    features = some_features(packed)
    single = gradients(drafter, packed, features)
    drafter.gradient_checkpointing = checkpointing
    for segments in (1, 2, 4, 8):
        assert_same(gradients(drafter, packed, features, segments), single)


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_extensions_equal_a_plain_computation(extension: str):
    drafter, packed = (
        random_drafter("p-eagle", draft_vocab=40, **EXTENSIONS[extension]),
        some_pack(SHORT),
    )
    features = some_features(packed)
    naive = reference(drafter, packed, features, "kl")
    for segments in (1, 4):
        assert_same(gradients(drafter, packed, features, segments), naive)


def test_a_frozen_drafter_has_no_gradients():
    """The dependency, confidence and refinement keep their gradients."""
    drafter, packed = random_drafter("p-eagle", **EXTENSIONS["all"]), some_pack(SHORT)
    features = some_features(packed)
    whole = gradients(drafter, packed, features)
    drafter.requires_grad_(False)
    drafter.dependency.requires_grad_(True)
    drafter.confidence.requires_grad_(True)
    drafter.refinement.requires_grad_(True)
    parts = gradients(drafter, packed, features, 2)
    assert {name.split(".")[0] for name in parts} == {"dependency", "confidence", "refinement"}
    assert_same(parts, {name: whole[name] for name in parts})


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("draft_vocab", [None, 40])
@pytest.mark.parametrize("method", METHODS)
def test_equals_a_plain_computation(method: Method, draft_vocab: int | None, options: str):
    drafter, packed = random_drafter(method, draft_vocab=draft_vocab), some_pack(SHORT)
    features = some_features(packed)
    naive = reference(drafter, packed, features, options)
    for segments in (1, 4):
        assert_same(gradients(drafter, packed, features, segments, options), naive)


@pytest.mark.parametrize("options", ["kl", "mix, soft-capped", "ce, lighter with depth"])
@pytest.mark.parametrize("method", METHODS)
def test_on_policy_weights_of_anchors(method: Method, options: str):
    """The drafter is right at some rows; otherwise every anchor would have the same weight."""
    drafter, packed = random_drafter(method), some_pack(SHORT)
    features = half_right(drafter, packed, some_features(packed))
    naive = reference(drafter, packed, features, options, on_policy=0.8)
    for segments in (1, 4):
        weighted = gradients(drafter, packed, features, segments, options, on_policy=0.8)
        assert_same(weighted, naive)
    plain = gradients(drafter, packed, features, 1, options)
    assert not torch.allclose(weighted["fc.weight"], plain["fc.weight"], rtol=0.05)


@pytest.mark.parametrize("options", ["kl", "ce, lighter with depth"])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_refinement_learns_from_reached_rows(passes: int, options: str):
    """Only rows after right drafts count."""
    drafter, packed = random_drafter("p-eagle", refinement=passes), some_pack(SHORT)
    features = half_right(drafter, packed, some_features(packed))
    naive = reference(drafter, packed, features, options)
    for segments in (1, 4):
        assert_same(gradients(drafter, packed, features, segments, options), naive)
    fewer = gradients(drafter, packed, some_features(packed), 1, options)
    name = "refinement.self_attn.q_proj.weight"
    assert not torch.allclose(fewer[name], naive[name], rtol=0.05)


def half_right(drafter: Drafter, packed: PackedDocuments, features: PackFeatures) -> PackFeatures:
    """Features for which the drafts of depth 0 are right at every second row."""
    rows = np.arange(0, len(packed.ids) - 1, 2)
    own = dense_rows if drafter.config.method == "p-eagle" else unrolled_rows
    with torch.no_grad():
        valid = rows[packed.max_chain_lengths[rows] > 0]
        normed = own(drafter, packed, features.taps, valid, np.zeros_like(valid))
        newest = torch.from_numpy(packed.ids[valid + 1])
        normed = drafter.refine(normed[:, None], newest)[:, 0]
    teacher = features.teacher.clone()
    teacher[valid + 1] = normed
    return PackFeatures(features.taps, teacher)


@pytest.mark.parametrize("method", METHODS)
def test_trained_embeddings(method: Method):
    """The embeddings have gradients from depth 0 and, with EAGLE-3, from the chains."""
    drafter, packed = random_drafter(method, layers=1), some_pack(SHORT)
    drafter.make_embeddings_trainable()
    features = some_features(packed)
    naive = reference(drafter, packed, features, "kl")
    assert "embed_tokens" in naive
    assert_same(gradients(drafter, packed, features, 2), naive)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("segments", [1, 2, 4, 8])
def test_depth_0_runs_once(method: Method, segments: int):
    drafter, packed = random_drafter(method, layers=1), some_pack()
    passes, seen = DrafterPasses(drafter), []
    plain = passes.context
    passes.context = lambda ids, *rest: seen.append(len(ids)) or plain(ids, *rest)  # type: ignore[method-assign]
    gradients(drafter, packed, some_features(packed), segments, passes=passes)
    assert seen == [len(packed.ids)]


@pytest.mark.parametrize("method", METHODS)
def test_padding_has_no_gradient(method: Method):
    """Values in the padding of a pack or of a level have no effect."""
    drafter, packed = random_drafter(method), some_pack()
    features = some_features(packed)
    g, last = features
    total = int(packed.lengths.sum())
    assert total < len(packed.ids)
    g.requires_grad_()
    first = gradients(drafter, packed, features)
    assert g.grad[:total].abs().max() > 0 and not g.grad[total:].any()
    other, elsewhere = g.detach().clone(), last.clone()
    other[total:], elsewhere[total:] = 7.0, -7.0
    changed = PackFeatures(other, elsewhere)
    assert_same(gradients(drafter, packed, changed), first, 1e-7)
    padded = PackFeatures(other, last)
    assert_same(gradients(drafter, packed, padded, level_sizes=(700,) * K), first)


def test_no_gradient_crosses_documents():
    """The gradients of single documents add up to those of a pack that has both."""
    drafter, (left, right) = (
        random_drafter("p-eagle"),
        (some_pack(((40, 5),), 1), some_pack(((30, 9),), 2)),
    )
    documents = [(p.ids[:n], p.answer_mask[:n]) for p, n in ((left, 40), (right, 30))]
    both = pack_sequences(documents)
    g, last = some_features(both)
    whole = full_gradients(drafter, both, PackFeatures(g, last))
    cuts = [PackFeatures(g, last), PackFeatures(g.roll(-40, 0), last.roll(-40, 0))]
    parts = [
        full_gradients(drafter, pack_sequences([document]), cut)
        for document, cut in zip(documents, cuts, strict=True)
    ]
    assert_same({name: parts[0][name] + parts[1][name] for name in whole}, whole)


def full_gradients(drafter: Drafter, packed: PackedDocuments, features: PackFeatures) -> Gradients:
    """Gradients of the summed losses of all chains at their full length."""
    drafter.zero_grad()
    batch = build_batch(
        packed, sample_chains(packed.max_chain_lengths, K, 1.0, np.random.default_rng(0))
    )
    loss = Loss(drafter.lm_head, K, *OPTIONS["kl"])
    pack_gradients(DrafterPasses(drafter), batch, features, loss, 1.0)
    return {name: p.grad.clone() for name, p in drafter.named_parameters()}
