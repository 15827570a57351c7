"""A training row equals the inference row: trained drafters give the same logits at every depth."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from peagle.core import Method
from peagle.drafter import Drafter
from peagle.reference.proposer import Verified, proposer_for
from peagle.train.data.attention_mask import build_mask
from peagle.train.data.chains import full_chains
from peagle.train.data.pack import BatchLayout, PackedDocuments, build_batch, pack_sequences
from peagle.train.features.features import FeatureExtractor
from peagle.train.objective.gradients import run_level
from peagle.train.objective.passes import DrafterPasses, rows_before_in_chain
from tests.support.models.tiny_models import AUX
from tests.support.train.training import (
    EAGLE3_EXTENSIONS,
    EXTENSIONS,
    Trained,
    some_batch,
    some_pack,
    trained,
)

K = 6
PREFIXES = (1, 4, 5, 17, 29)  # tokens consumed before the first draft
METHODS: list[Method] = ["p-eagle", "eagle3"]


def document(one: Trained, number: int) -> np.ndarray:
    return np.array(json.loads(one.data.read_text().splitlines()[number])["ids"])


def decoded(one: Trained, ids: list[int], n: int, monkeypatch) -> tuple[Tensor, Tensor]:
    """(logits [K, V], drafts [K]) of the decoding loop, which consumes ids[:n] in two passes
    with a rejected draft between them. The logits are those of the last pass of a refinement.
    """
    one.target.tap(AUX)
    seen: list[Tensor] = []
    plain = Drafter.logits
    with monkeypatch.context() as patch:
        patch.setattr(Drafter, "logits", lambda self, x: seen.append(plain(self, x)) or seen[-1])
        proposer, tokens = proposer_for(one.drafter), torch.tensor(ids)
        cut = max(1, n - 3)
        g = one.target.forward(tokens[:n]).hidden
        drafts = proposer.propose(Verified(tokens[:cut], g[:cut], 0, 0, tokens[cut : cut + 1]), K)
        if cut < n:
            seen.clear()
            block = torch.cat([tokens[cut:n], torch.tensor([90])])  # 90 is rejected
            hidden = torch.cat([g[cut:n], torch.randn(1, g.shape[1])])
            drafts = proposer.propose(Verified(block, hidden, cut, 1, tokens[n : n + 1]), K)
    return torch.cat(seen)[-K:].clone(), drafts.clone()


@torch.no_grad()
def training_rows(
    one: Trained, packed: PackedDocuments, anchors: np.ndarray, drafts: Tensor, shift: int = 0
) -> Tensor:
    """[anchors, K, V]: the training forward over a whole pack. EAGLE-3 is fed `drafts`
    [anchors, K].
    """
    by_depth = one.drafter.config.method != "p-eagle"
    layout = BatchLayout(by_depth, bidirectional=one.drafter.config.bidirectional)
    batch = build_batch(packed, full_chains(anchors, K), layout)
    passes = DrafterPasses(one.drafter)
    g = FeatureExtractor(one.target, AUX)(batch).taps.roll(shift, 0)
    mask = build_mask(batch.context, batch.context, flex=False)
    normed, feedback, cache = passes("context", batch.next_ids, g, batch.positions, mask)
    plain_context, context_cache = normed, cache
    out, seen = [normed[torch.from_numpy(anchors)]], batch.context
    for depth, level in enumerate(batch.segments[0].levels):
        seen = seen + level.rows
        ids = (
            torch.cat([drafts[:, depth], drafts.new_zeros(len(level.rows) - level.num_unpadded)])
            if by_depth
            else None
        )
        normed, feedback, cache = run_level(
            passes, level, feedback, cache, build_mask(level.rows, seen, False), ids
        )
        live = normed[: level.num_unpadded]
        out += [live] if by_depth else list(live.view(len(anchors), K - 1, -1).unbind(1))
    rows = torch.stack(out, 1)
    if not one.drafter.config.refinement:
        return one.drafter.logits(rows)
    [level] = batch.segments[0].levels
    refined, cache = passes("refine_context", plain_context, batch.next_ids, context_cache)
    first = refined[torch.from_numpy(anchors)][:, None]
    plain_rows = torch.cat([rows[:, 1:].flatten(0, 1), normed[level.num_unpadded :]])
    mask = build_mask(level.rows.in_blocks, seen, False)
    for _ in range(one.drafter.config.refinement):
        fed = one.drafter.target_token_ids(one.drafter.logits(rows).argmax(-1))[:, :-1].flatten()
        fed = torch.cat([fed, fed.new_zeros(len(plain_rows) - len(fed))])
        deeper = passes("refine_chains", plain_rows, fed, level.rows.depth, cache, mask)
        deeper = deeper[: level.num_unpadded].unflatten(0, (len(anchors), -1))
        rows = torch.cat([first, deeper], 1)
    return one.drafter.logits(rows)


KINDS = [
    *((method, vocab, "") for method in METHODS for vocab in (0, 48)),
    *(("p-eagle", 48, extension) for extension in EXTENSIONS),
    *(("eagle3", 48, extension) for extension in EAGLE3_EXTENSIONS),
]


@pytest.mark.parametrize(("method", "draft_vocab", "extension"), KINDS)
def test_a_training_row_equals_the_inference_row(
    method: Method, draft_vocab: int, extension: str, monkeypatch
):
    one = trained(method, draft_vocab, extension)
    ids = document(one, 3)
    before = document(one, 5)  # another document of the pack, which must not matter
    packed = pack_sequences([(before, before > 0), (ids, ids > 0)])
    loops = [decoded(one, ids.tolist(), n, monkeypatch) for n in PREFIXES]
    logits, drafts = (torch.stack(part) for part in zip(*loops, strict=True))
    anchors = len(before) + np.array(PREFIXES) - 1
    torch.testing.assert_close(
        training_rows(one, packed, anchors, drafts), logits, rtol=1e-4, atol=1e-5
    )
    for shift in (1, -1):  # the control: hidden states off by one position
        wrong = training_rows(one, packed, anchors, drafts, shift)
        assert (wrong - logits).abs().amax((1, 2)).min() > 0.01, (
            "a shift of the hidden states is not detected"
        )


@pytest.mark.parametrize("extension", ["inject", "bidirectional", "convolution", "refinement"])
def test_every_extension_matters(extension: str, monkeypatch):
    """Without its extension, the drafter gives other logits, in row 0 only for some extensions."""
    one = trained("p-eagle", 48, extension)
    plain = Drafter(replace(one.drafter.config, **{extension: False}))
    plain.load_state_dict(
        {name: t for name, t in one.drafter.state_dict().items() if extension not in name}
    )
    plain.set_embed_and_head(one.drafter.embed_tokens, one.drafter.lm_head, one.drafter.target_ids)
    ids = document(one, 3).tolist()
    with_it, without = (
        decoded(o, ids, 10, monkeypatch)[0] for o in (one, replace(one, drafter=plain.eval()))
    )
    differs = ((with_it - without).abs().amax(1) > 1e-3).tolist()
    changes_first_row = extension in ("inject", "refinement")
    assert differs[1:-1] == [True] * (K - 2) and differs[0] == changes_first_row


def test_the_normed_feedback_matters(monkeypatch):
    """Without it, every draft but the first reads another hidden state."""
    one = trained("eagle3", 48, "norm_output")
    assert one.drafter.config.norm_output
    ids = document(one, 3).tolist()
    with_it = decoded(one, ids, 10, monkeypatch)[0]
    one.drafter.config = replace(one.drafter.config, norm_output=False)
    try:
        without = decoded(one, ids, 10, monkeypatch)[0]
    finally:
        one.drafter.config = replace(one.drafter.config, norm_output=True)
    assert ((with_it - without).abs().amax(1) > 1e-3).tolist() == [False] + [True] * (K - 1)


def test_a_corrected_training_row_equals_the_pair():
    """A row that training corrects by the token before it equals the score of that pair."""
    drafter = trained("p-eagle", 48, "dependency").drafter
    torch.manual_seed(0)
    normed = torch.randn(3, K, drafter.config.hidden_size)
    ids, pairs = drafter.score_pairs(normed)
    plain = drafter.logits(normed)
    torch.testing.assert_close(pairs[:, 0, 0], plain[:, 0].gather(-1, ids[:, 0]))
    passes = DrafterPasses(drafter)
    for row, before in ((1, 0), (4, 13)):
        previous_ids = drafter.target_token_ids(ids[:, row - 1, before])
        logits = drafter.logits(passes("apply_dependency", normed[:, row], previous_ids))
        torch.testing.assert_close(
            pairs[:, row, before], logits.gather(-1, ids[:, row]), rtol=1e-4, atol=1e-4
        )
        assert (logits - plain[:, row]).abs().amax() > 0.1, "the dependency has no effect"
        assert torch.equal(
            passes("apply_dependency", normed[:, row], torch.full_like(previous_ids, -1)),
            normed[:, row],
        )


@pytest.mark.parametrize("method", METHODS)
def test_every_depth_matters(method: Method, monkeypatch):
    """Rows of different depths differ, so the comparison above is meaningful."""
    logits, _ = decoded(trained(method), document(trained(method), 3).tolist(), 10, monkeypatch)
    assert (logits[1:] - logits[:-1]).abs().amax(1).min() > 0.005


@pytest.mark.parametrize("method", METHODS)
def test_the_folder_has_the_trained_drafter(method: Method):
    """It is marked as trained, has the configured sizes, and its loss fell."""
    one = trained(method)
    losses = [entry["loss"] for entry in one.entries if "loss" in entry]
    assert (
        one.drafter.config.trained
        and one.drafter.config.k_trained == 5
        and one.drafter.config.method == method
    )
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_autocast_keeps_weights_in_float32():
    """In bfloat16, weights stay in float32."""
    one = trained("p-eagle")
    ids = document(one, 1)
    packed = pack_sequences([(ids, ids > 0)])
    batch = build_batch(packed, full_chains(np.array([5]), K))
    g = FeatureExtractor(one.target, AUX)(batch).taps
    mask = build_mask(batch.context, batch.context, flex=False)
    dtypes = (torch.float32, torch.bfloat16)
    exact, low = (
        DrafterPasses(one.drafter, t)("context", batch.next_ids, g, batch.positions, mask)[0]
        for t in dtypes
    )
    torch.testing.assert_close(low.float(), exact, rtol=0.1, atol=0.1)
    assert not torch.equal(low.float(), exact) and one.drafter.fc.weight.dtype == torch.float32


@pytest.mark.parametrize("segments", [1, 3])
def test_no_two_rows_read_the_same_row_before(segments: int):
    """Padding rows read themselves, not the padding of the context, which has arbitrary values."""
    batch = some_batch(some_pack(), 5, segments=segments)
    for segment in batch.segments:
        [level] = segment.levels
        rows, size, context = level.rows, level.num_unpadded, segment.context_length
        before = rows_before_in_chain(rows, context).tolist()
        assert len(before) > size and len(set(before)) == len(before)
        assert before[size:] == list(range(context + size, context + len(rows)))
        anchors, depths = rows.anchor.tolist(), rows.depth.tolist()
        assert before[:size] == [
            anchors[i] if depths[i] == 1 else context + i - 1 for i in range(size)
        ]
