"""The chunked loss: value and gradient equal autograd on whole logits, which it never holds."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from peagle.train.objective import loss as module
from peagle.train.objective.loss import Loss, TopK
from tests.support.training import row_losses

ROWS, D, V, K = 50, 16, 40, 5
KINDS = [
    ("kl", 0.5),
    ("ce", 0.5),
    ("mix", 0.3),
    ("mix", 1.0),
    ("mix", 0.0),
    ("tv", 0.5),
    ("tvmix", 0.9),
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
def test_equals_autograd(monkeypatch, chunk: int, kind: str, mix: float, softcap: float):
    monkeypatch.setattr(module, "CHUNK", chunk)
    normed, teacher, depth, head = make()
    gradient, sums = Loss(head, K, kind, mix, 0.7, softcap)(normed, teacher, depth, 0.01)
    leaf = normed.clone().requires_grad_()
    losses = row_losses(leaf, teacher, head, kind, mix, softcap)
    (0.01 * (0.7**depth) * losses).sum().backward()
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-5, atol=1e-7)
    per_depth = torch.zeros(K, dtype=torch.float64).index_add(0, depth, losses.detach().double())
    torch.testing.assert_close(sums.loss, per_depth, rtol=1e-5, atol=1e-6)
    assert sums.rows.tolist() == depth.bincount(minlength=K).tolist()
    right = (normed @ head.T).argmax(-1) == (teacher @ head.T).argmax(-1)
    assert sums.matches.tolist() == depth[right].bincount(minlength=K).tolist()


@pytest.mark.parametrize(("kind", "mix"), KINDS)
def test_a_captured_teacher_that_knows_every_token_is_the_whole_one(kind: str, mix: float):
    """Its likeliest first, some outside the draft vocabulary."""
    normed, teacher, depth, head = make()
    whole, sums = Loss(head, K, kind, mix, 0.7, 0.0)(normed, teacher, depth, 0.01)
    logits, ids = (teacher @ head.T).sort(-1, descending=True)
    outside = torch.full((ROWS, 3), -1)
    told = TopK(
        torch.cat([logits.max() + torch.zeros(ROWS, 3), logits], 1), torch.cat([outside, ids], 1)
    )
    gradient, same = Loss(head, K, kind, mix, 0.7, 0.0)(normed, told, depth, 0.01)
    torch.testing.assert_close(gradient, whole, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(same.loss, sums.loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["kl", "tv", "tvmix"])
def test_a_captured_teacher_equals_autograd(kind: str):
    normed, teacher, depth, head = make()
    logits, ids = (teacher @ head.T).topk(4)
    ids[::2, 1] = -1
    ids[5] = -1  # nothing known: the row counts nothing
    gradient, _ = Loss(head, K, kind, 0.9, 1.0, 0.0)(normed, TopK(logits, ids), depth, 1.0)
    leaf = normed.clone().requires_grad_()
    known = torch.full((ROWS, V + 1), -torch.inf).scatter(-1, ids % (V + 1), logits)[:, :V]
    p, log_q = known.softmax(-1).nan_to_num(), (leaf @ head.T).log_softmax(-1)
    tv, kl = (log_q.exp() - p).abs().sum(-1) / 2, kl_div(log_q, p, reduction="none").sum(-1)
    ce = cross_entropy(leaf @ head.T, known.argmax(-1), reduction="none")
    rows = {"kl": kl, "tv": tv, "tvmix": 0.9 * tv + 0.1 * ce}[kind]
    rows[torch.arange(ROWS) != 5].sum().backward()
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-4, atol=1e-5)


def test_one_minus_total_variation_is_the_acceptance_of_sampling():
    normed, teacher, _, head = make()
    _, sums = Loss(head, 1, "tv", 0.5, 1.0, 0.0)(
        normed, teacher, torch.zeros(ROWS, dtype=torch.int32), 1.0
    )
    q, p = (normed @ head.T).softmax(-1), (teacher @ head.T).softmax(-1)
    accepted = torch.minimum(p, q).sum(-1)  # of a draft x from q: min(1, p / q)
    assert float(sums.loss) == pytest.approx(float((1 - accepted).sum()), rel=1e-5)


def test_chances_are_those_of_the_teachers_best(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 16)
    normed, teacher, _, head = make()
    found = Loss(head, K, "length", 0.5, 1.0, 0.0).chances(normed, teacher)
    best = (teacher @ head.T).argmax(-1)
    torch.testing.assert_close(found, (normed @ head.T).softmax(-1)[torch.arange(ROWS), best])


def test_depth_weights_and_scale_reach_the_gradient_alone():
    """Logged losses stay those of the rows: runs with other weights can be compared."""
    normed, teacher, _, head = make()
    depth = torch.full((ROWS,), 3, dtype=torch.int32)
    plain, logged = Loss(head, K, "kl", 1.0, 1.0, 0.0)(normed, teacher, depth, 1.0)
    light, same = Loss(head, K, "kl", 1.0, 0.5, 0.0)(normed, teacher, depth, 4.0)
    torch.testing.assert_close(light, plain * 4 * 0.5**3)
    torch.testing.assert_close(same.loss, logged.loss)


def test_the_gradient_of_a_perfect_row_is_zero():
    _, teacher, depth, head = make()
    gradient, sums = Loss(head, K, "kl", 1.0, 1.0, 0.0)(teacher, teacher, depth, 1.0)
    assert (
        gradient.abs().max() < 1e-6
        and sums.loss.abs().max() < 1e-4
        and sums.matches.equal(sums.rows)
    )


def test_no_more_than_a_chunk_of_logits_at_once(monkeypatch):
    """Nothing of [rows, vocabulary] is made: no product with lm_head has more rows than a chunk."""
    monkeypatch.setattr(module, "CHUNK", 8)
    largest, plain = [], torch.nn.functional.linear

    def spy(x: Tensor, weight: Tensor) -> Tensor:
        out = plain(x, weight)
        largest.append(out.numel())
        return out

    monkeypatch.setattr(module, "linear", spy)
    normed, teacher, depth, head = make()
    gradient, _ = Loss(head, K, "mix", 0.5, 1.0, 0.0)(normed, teacher, depth, 1.0)
    assert len(largest) == 3 * 7 and max(largest) == 8 * V < ROWS * V
    assert not gradient.requires_grad


def test_no_rows_at_all():
    normed, teacher, depth, head = make(rows=0)
    gradient, sums = Loss(head, K, "kl", 1.0, 1.0, 0.0)(normed, teacher, depth, 1.0)
    assert gradient.shape == (0, D) and not sums.rows.any()


def test_one_shape_for_compiled_code(monkeypatch):
    """From one chunk on, every call has CHUNK rows; fewer rows than a chunk come as they are."""
    monkeypatch.setattr(module, "CHUNK", 16)
    normed, teacher, depth, head = make()
    loss, shapes = Loss(head, K, "kl", 1.0, 1.0, 0.0), []
    plain = loss.chunk
    loss.chunk = lambda *args: shapes.append(len(args[0])) or plain(*args)
    loss(normed, teacher, depth, 1.0)
    loss(normed[:5], teacher[:5], depth[:5], 1.0)
    assert shapes == [16, 16, 16, 16, 5]
