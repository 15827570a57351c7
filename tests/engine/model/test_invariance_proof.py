"""Engines of a target share a probe of batch invariance, unless they need a larger one."""

from typing import Any

import pytest
import torch

from peagle.draft_shape import NO_DRAFT, DraftShape
from peagle.engine.model.batch_invariance import (
    InvarianceProbe,
    InvarianceProof,
    enable_batch_invariance,
)
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.verifier import build_verifier
from peagle.loaded import LoadedPair
from tests.support.engine.engines import engine_of, pair_of
from tests.support.kernels.cpu_features import needs_c
from tests.support.models.tiny_models import make_drafter, make_target


@pytest.fixture
def pair() -> LoadedPair:
    """A pair in bfloat16 that was never probed."""
    target = make_target()
    target.model.to(torch.bfloat16)
    return pair_of(target, {"p-eagle": make_drafter(target, "p-eagle", 2)})


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let every probe succeed, and record the number of rows of its chains."""
    blocks: list[int] = []
    monkeypatch.setattr(InvarianceProbe, "difference", lambda probe: blocks.append(probe.block))
    return blocks


@needs_c
def test_engines_share_a_probe(pair: LoadedPair, probed: list[int]) -> None:
    def probes(method: str, k: int, **options: Any) -> int:
        before = len(probed)
        engine = engine_of(pair, method, k, kv_tokens=600, **options)
        assert engine.exact_mode == ("batched" if options.get("exact") is not False else None)
        engine.close()
        return len(probed) - before

    assert probes("p-eagle", 3) == 1
    assert probes("p-eagle", 3) == probes("none", 1) == probes("p-eagle", 7) == 0
    assert probes("p-eagle", 9) == 1
    assert probes("p-eagle", 8) == 0
    assert probes("p-eagle", 4, tree=12) == 1
    assert probes("p-eagle", 3, tree=9) == 0
    assert probes("p-eagle", 4, tree=13) == probes("p-eagle", 5, tree=12) == 1
    assert probes("p-eagle", 3, page_size=8) == 1
    assert probes("p-eagle", 3, int8=True) == 1
    assert probes("p-eagle", 3, int8=True) == 0
    assert probes("p-eagle", 3, exact=True) == 1  # Required exact mode is always probed.
    assert probes("p-eagle", 3, exact=False) == 0


@needs_c
def test_another_target_is_probed(pair: LoadedPair, probed: list[int]) -> None:
    other = make_target()
    other.model.to(torch.bfloat16)
    for target in (pair.target, other, pair.target):
        enable_batch_invariance(build_verifier(target, 300), target, 16, NO_DRAFT, reuse_proof=True)
    assert len(probed) == 2


@needs_c
def test_a_failed_probe_is_not_reused(pair: LoadedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = ["a tree changes its results", None]
    monkeypatch.setattr(InvarianceProbe, "difference", lambda probe: reasons.pop(0))
    modes = [engine_of(pair, "p-eagle", max_batch=4).exact_mode for _ in range(3)]
    assert modes == [None, "batched", "batched"] and not reasons


@needs_c
def test_only_the_c_kernels_share_a_probe(pair: LoadedPair, probed: list[int]) -> None:
    """On a GPU, every verifier chooses its own vendor GEMMs."""
    target = pair.target
    for in_c, count in ((True, 1), (True, 1), (False, 2), (False, 3)):
        verifier = build_verifier(target, 300)
        assert isinstance(verifier, FusedLlamaTarget)
        if not in_c:
            verifier.cpu_layers = None
        reason = enable_batch_invariance(verifier, target, 16, NO_DRAFT, reuse_proof=True)
        assert reason is None and len(probed) == count


CHAIN = DraftShape(11, 11)
TREE = DraftShape(5, 20)


@pytest.mark.parametrize(
    ("proven", "needed", "covered"),
    [
        (NO_DRAFT, NO_DRAFT, True),
        (NO_DRAFT, DraftShape(7, 7), True),  # The probe has the same passes.
        (NO_DRAFT, DraftShape(8, 8), False),
        (CHAIN, CHAIN, True),
        (CHAIN, DraftShape(9, 9), True),
        (CHAIN, DraftShape(12, 12), False),
        (CHAIN, DraftShape(4, 8), False),
        (TREE, DraftShape(5, 5), True),
        (TREE, DraftShape(7, 7), True),
        (TREE, DraftShape(8, 8), False),
        (TREE, TREE, True),
        (TREE, DraftShape(4, 12), True),
        (TREE, DraftShape(6, 20), False),
        (TREE, DraftShape(5, 21), False),
    ],
)
def test_a_probe_covers_smaller_drafts(
    proven: DraftShape, needed: DraftShape, covered: bool
) -> None:
    proofs = [InvarianceProof(torch.bfloat16, False, 64, shape) for shape in (proven, needed)]
    assert proofs[0].covers(proofs[1]) == covered


def test_a_probe_covers_only_its_dtype_int8_and_page_size() -> None:
    proof = InvarianceProof(torch.bfloat16, False, 64, CHAIN)
    assert not proof.covers(InvarianceProof(torch.float16, False, 64, CHAIN))
    assert not proof.covers(InvarianceProof(torch.bfloat16, True, 64, CHAIN))
    assert not proof.covers(InvarianceProof(torch.bfloat16, False, 16, CHAIN))
