"""Imports run without garbage collection, and their objects are frozen afterwards."""

import gc
import sys

import pytest

from peagle.engine.gc_tuning import collection_paused


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record calls of gc.freeze, which would freeze all objects of the tests."""
    calls: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    return calls


def test_imports_run_without_collections(
    frozen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(ImportError), collection_paused():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    assert frozen == ["freeze"]


def test_nothing_changes_where_torch_is_imported(frozen: list[str]) -> None:
    import torch  # noqa: F401

    with collection_paused():
        assert gc.isenabled()
    assert frozen == []
