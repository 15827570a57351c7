"""The chunked loss: its value and gradient equal autograd on full logits."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from peagle.train.features.teacher import TopKLogits
from peagle.train.objective import chunk_loss as module
from peagle.train.objective.loss import Loss
from tests.support.train.training import row_losses

ROWS, D, V, K = 50, 16, 40, 5
KINDS = [
    ("kl", 0.5),
    ("ce", 0.5),
    ("mix", 0.3),
    ("mix", 1.0),
    ("mix", 0.0),
    ("tv", 0.5),
    ("tvmix", 0.9),
    ("lk", 1.0),
    ("lk", 0.9),
]


def make(seed: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """normed and teacher [R, d], depth [R], lm_head [V, d]."""
    generator = torch.Generator().manual_seed(seed)
    normed, teacher = (torch.randn(rows, D, generator=generator) for _ in range(2))
    depth = torch.randint(0, K, (rows,), generator=generator, dtype=torch.int32)
    return normed, teacher, depth, torch.randn(V, D, generator=generator)


@pytest.mark.parametrize("chunk", [7, 25, 49, 50, 51, 4096])
@pytest.mark.parametrize(("kind", "mix"), KINDS)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_equals_autograd(chunk: int, kind: str, mix: float, softcap: float):
    normed, teacher, depth, head = make()
    loss = Loss(head, K, kind, mix, 0.7, softcap, chunk_rows=chunk)
    output = loss(normed, teacher, depth, 0.01)
    gradient, sums = output.gradient, output.sums
    leaf = normed.clone().requires_grad_()
    losses = row_losses(leaf, teacher, head, kind, mix, softcap)
    (0.01 * (0.7**depth) * losses).sum().backward()
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-5, atol=1e-7)
    per_depth = torch.zeros(K, dtype=torch.float64).index_add(0, depth, losses.detach().double())
    torch.testing.assert_close(sums.loss, per_depth, rtol=1e-5, atol=1e-6)
    assert sums.rows.tolist() == depth.bincount(minlength=K).tolist()
    right = (normed @ head.T).argmax(-1) == (teacher @ head.T).argmax(-1)
    assert sums.matches.tolist() == depth[right].bincount(minlength=K).tolist()
    assert output.matches.bool().tolist() == right.tolist()
    torch.testing.assert_close(output.log_probs, (normed @ head.T).log_softmax(-1).amax(-1))


@pytest.mark.parametrize(("kind", "mix"), KINDS)
def test_a_captured_teacher_with_every_token_equals_hidden_states(kind: str, mix: float):
    """Tokens are sorted by probability; some are outside the draft vocabulary."""
    normed, teacher, depth, head = make()
    whole = Loss(head, K, kind, mix, 0.7, 0.0)(normed, teacher, depth, 0.01)
    logits, ids = (teacher @ head.T).sort(-1, descending=True)
    outside = torch.full((ROWS, 3), -1)
    captured = TopKLogits(
        torch.cat([logits.max() + torch.zeros(ROWS, 3), logits], 1), torch.cat([outside, ids], 1)
    )
    same = Loss(head, K, kind, mix, 0.7, 0.0)(normed, captured, depth, 0.01)
    torch.testing.assert_close(same.gradient, whole.gradient, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(same.sums.loss, whole.sums.loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["kl", "tv", "tvmix", "lk"])
def test_a_captured_teacher_equals_autograd(kind: str):
    normed, teacher, depth, head = make()
    logits, ids = (teacher @ head.T).topk(4)
    ids[::2, 1] = -1
    ids[5] = -1  # No token of this row is known, so its loss is zero.
    output = Loss(head, K, kind, 0.9, 1.0, 0.0)(normed, TopKLogits(logits, ids), depth, 1.0)
    leaf = normed.clone().requires_grad_()
    known = torch.full((ROWS, V + 1), -torch.inf).scatter(-1, ids % (V + 1), logits)[:, :V]
    p, log_q = known.softmax(-1).nan_to_num(), (leaf @ head.T).log_softmax(-1)
    tv, kl = (log_q.exp() - p).abs().sum(-1) / 2, kl_div(log_q, p, reduction="none").sum(-1)
    ce = cross_entropy(leaf @ head.T, known.argmax(-1), reduction="none")
    share = (3 * (tv - 1)).exp().detach()
    lk = share * kl + (1 - share) * tv
    rows = {"kl": kl, "tv": tv, "tvmix": 0.9 * tv + 0.1 * ce, "lk": 0.9 * lk + 0.1 * ce}[kind]
    rows[torch.arange(ROWS) != 5].sum().backward()
    torch.testing.assert_close(output.gradient, leaf.grad, rtol=1e-4, atol=1e-5)


def test_one_minus_total_variation_is_the_acceptance_of_sampling():
    normed, teacher, _, head = make()
    depth = torch.zeros(ROWS, dtype=torch.int32)
    output = Loss(head, 1, "tv", 0.5, 1.0, 0.0)(normed, teacher, depth, 1.0)
    q, p = (normed @ head.T).softmax(-1), (teacher @ head.T).softmax(-1)
    accepted = torch.minimum(p, q).sum(-1)  # of a draft x from q: min(1, p / q)
    assert float(output.sums.loss) == pytest.approx(float((1 - accepted).sum()), rel=1e-5)


def test_probabilities_of_the_teachers_best_tokens():
    normed, teacher, _, head = make()
    loss = Loss(head, K, "length", 0.5, 1.0, 0.0, chunk_rows=16)
    probs = loss.teacher_token_probs(normed, teacher)
    best = (teacher @ head.T).argmax(-1)
    torch.testing.assert_close(probs, (normed @ head.T).softmax(-1)[torch.arange(ROWS), best])


def test_depth_weights_and_scale_affect_the_gradient_only():
    """Logged losses stay unweighted, so that runs with other weights can be compared."""
    normed, teacher, _, head = make()
    depth = torch.full((ROWS,), 3, dtype=torch.int32)
    plain = Loss(head, K, "kl", 1.0, 1.0, 0.0)(normed, teacher, depth, 1.0)
    light = Loss(head, K, "kl", 1.0, 0.5, 0.0)(normed, teacher, depth, 4.0)
    torch.testing.assert_close(light.gradient, plain.gradient * 4 * 0.5**3)
    torch.testing.assert_close(light.sums.loss, plain.sums.loss)


def test_the_gradient_of_a_perfect_row_is_zero():
    _, teacher, depth, head = make()
    output = Loss(head, K, "kl", 1.0, 1.0, 0.0)(teacher, teacher, depth, 1.0)
    sums = output.sums
    assert (
        output.gradient.abs().max() < 1e-6
        and sums.loss.abs().max() < 1e-4
        and sums.matches.equal(sums.rows)
    )


def test_logits_are_computed_in_chunks(monkeypatch):
    """No product with lm_head has more rows than a chunk."""
    largest, plain = [], torch.nn.functional.linear

    def spy(x: Tensor, weight: Tensor) -> Tensor:
        out = plain(x, weight)
        largest.append(out.numel())
        return out

    monkeypatch.setattr(module, "linear", spy)
    normed, teacher, depth, head = make()
    loss = Loss(head, K, "mix", 0.5, 1.0, 0.0, chunk_rows=8)
    gradient = loss(normed, teacher, depth, 1.0).gradient
    assert len(largest) == 3 * 7 and max(largest) == 8 * V < ROWS * V
    assert not gradient.requires_grad


def test_no_rows_at_all():
    normed, teacher, depth, head = make(rows=0)
    output = Loss(head, K, "kl", 1.0, 1.0, 0.0)(normed, teacher, depth, 1.0)
    assert output.gradient.shape == (0, D) and not output.sums.rows.any()


def test_compiled_code_gets_one_shape():
    """With at least one chunk of rows, every call has a full chunk; fewer rows are not padded."""
    normed, teacher, depth, head = make()
    loss, shapes = Loss(head, K, "kl", 1.0, 1.0, 0.0, chunk_rows=16), []
    plain = loss.chunk_loss
    loss.chunk_loss = lambda *args: shapes.append(len(args[0])) or plain(*args)
    loss(normed, teacher, depth, 1.0)
    loss(normed[:5], teacher[:5], depth[:5], 1.0)
    assert shapes == [16, 16, 16, 16, 5]
