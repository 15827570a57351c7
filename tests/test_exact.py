"""Exact mode: bit-equal logits with and without speculation, in bfloat16, and an honest refusal where it fails."""

import pytest
import torch

from peagle.core import Sampling
from peagle.decode import decode
from peagle.errors import UserError
from peagle.exact import probe, set_exact
from tests.conftest import CONFIGS, make_target
from tests.test_decode import PATTERNS, Oracle, plain, tokens_of

DENSE = [name for name in CONFIGS if name not in ("qwen3-moe", "gpt-oss")]


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_the_same_with_and_without_drafts(name: str, dtype: torch.dtype, prompt) -> None:
    target = make_target(name)
    target.model.to(dtype)
    ids = prompt(11)
    assert set_exact(target, True)
    expected = plain(target, ids, 60)
    for right in PATTERNS.values():
        assert tokens_of(list(decode(target, Oracle(ids, expected, right), ids, 7, 60, Sampling()))) == expected


def test_without_it_the_bits_differ() -> None:
    """Why the mode exists: one-row passes and a block's rows are not bit-equal in general."""
    assert not probe(make_target())


def test_default_is_where_it_is_needed(prompt) -> None:
    target = make_target()
    before = plain(target, prompt(5), 10)
    assert not set_exact(target, None), "float32 does without"
    assert set_exact(target, True)
    assert not set_exact(target, False)
    assert (target.model.config._attn_implementation, target.row_multiple) == ("sdpa", 1)
    assert plain(target, prompt(5), 10) == before
    target.model.to(torch.bfloat16)
    target.exact_multiple = 0  # probed in float32 before
    assert set_exact(target, None)


def test_large_blocks_are_probed_when_they_come_up(monkeypatch: pytest.MonkeyPatch, prompt) -> None:
    target, ids = make_target(), prompt(11)
    target.model.to(torch.bfloat16)
    assert set_exact(target, None, k=20)
    expected = plain(target, ids, 60)
    assert tokens_of(list(decode(target, Oracle(ids, expected, [True]), ids, 20, 60, Sampling()))) == expected
    monkeypatch.setattr("peagle.exact.probe", lambda *_: False)
    assert not set_exact(target, None, k=30)
    with pytest.raises(UserError, match="Use K up to 15"):
        set_exact(target, True, k=30)


def test_an_impossible_promise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    target.model.to(torch.bfloat16)
    monkeypatch.setattr("peagle.exact.probe", lambda *_: False)
    with pytest.raises(UserError, match="float32"):
        set_exact(target, True)
    assert not set_exact(target, None), "asked for nothing: plain decoding"
    assert target.row_multiple == 1
