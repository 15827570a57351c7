"""Exact mode: bit-equal logits with and without speculation, in bfloat16, and an honest refusal where it fails."""

import pytest
import torch

from peagle.core import Sampling
from peagle.decode import decode
from peagle.errors import UserError
from peagle.exact import probe, rows_for, set_exact
from tests.conftest import CONFIGS, make_target
from tests.test_decode import PATTERNS, Oracle, plain, tokens_of

DENSE = [name for name in CONFIGS if name not in ("qwen3-moe", "gpt-oss")]


def test_rows_come_in_groups() -> None:
    assert [rows_for(k) for k in (0, 1, 7, 8, 15)] == [8, 8, 8, 16, 16]


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_the_same_with_and_without_drafts(name: str, dtype: torch.dtype, prompt) -> None:
    target = make_target(name)
    target.model.to(dtype)
    ids = prompt(11)
    set_exact(target, rows_for(7))
    expected = plain(target, ids, 60)
    for right in PATTERNS.values():
        assert tokens_of(list(decode(target, Oracle(ids, expected, right), ids, 7, 60, Sampling()))) == expected


def test_without_it_the_bits_differ() -> None:
    """Why the mode exists: one-row passes and a block's rows are not bit-equal in general."""
    target = make_target()
    target.fixed_rows = 0
    assert not probe(target, 8)


def test_it_can_be_switched_off_again(prompt) -> None:
    target = make_target()
    before = plain(target, prompt(5), 10)
    set_exact(target, 8)
    set_exact(target, 0)
    assert target.model.config._attn_implementation == "sdpa"
    assert plain(target, prompt(5), 10) == before


def test_an_impossible_promise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    monkeypatch.setattr("peagle.exact.probe", lambda *_: False)
    with pytest.raises(UserError, match="float32"):
        set_exact(target, 8)
    assert target.fixed_rows == 0
