"""The dtype is measured once per machine, remembered, and obeyed."""

import json
import platform
from pathlib import Path

import pytest
import torch

from peagle.errors import UserError
from peagle.target import precision


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"float32": 200.0, "bfloat16": 100.0}, torch.bfloat16),
        ({"float32": 105.0, "bfloat16": 100.0}, torch.float32),  # not a clear win
        ({"float32": 100.0, "bfloat16": 900.0}, torch.float32),
    ],
)
def test_the_faster_one_is_taken(times: dict, expected: torch.dtype) -> None:
    calls = []

    def measure() -> dict[str, float]:
        calls.append(1)
        return times

    assert precision.choose_dtype("auto", "cpu", measure) == expected
    assert precision.choose_dtype("auto", "cpu", measure) == expected
    assert len(calls) == 1, "measured once, then stored"


def test_measuring_is_quick_and_remembered(own_home: Path) -> None:
    precision.choose_dtype("auto", "cpu")
    times = next(iter(json.loads((own_home / "precision.json").read_text()).values()))
    assert 0 < min(times.values()) < 1e5


def test_a_spoilt_memory_is_measured_again(own_home: Path) -> None:
    for content in ("{", "[]", "null", '{"x": {}}'):
        (own_home / "precision.json").write_text(content)
        assert precision.choose_dtype("auto", "cpu") in (torch.float32, torch.bfloat16)


def test_containers_with_new_host_names_share_one_measurement(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def measure() -> dict[str, float]:
        calls.append(1)
        return {"float32": 2.0, "bfloat16": 1.0}

    for host in range(5):
        monkeypatch.setattr(platform, "node", lambda host=host: f"pod-{host}")
        precision.choose_dtype("auto", "cpu", measure)
    assert len(calls) == 1
    assert len(json.loads((own_home / "precision.json").read_text())) == 1


def test_the_file_is_bounded(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest kinds of machines stay."""
    times = {"float32": 2.0, "bfloat16": 1.0}
    for kind in range(precision.MAX_STORED + 20):
        monkeypatch.setattr(precision, "cpu_name", lambda kind=kind: f"kind-{kind}")
        precision.choose_dtype("auto", "cpu", lambda: times)
    stored = list(json.loads((own_home / "precision.json").read_text()))
    assert len(stored) == precision.MAX_STORED
    assert stored[0].startswith("kind-20 ") and stored[-1].startswith("kind-83 ")


def test_words() -> None:
    assert precision.choose_dtype("bfloat16", "cpu") == torch.bfloat16
    assert precision.choose_dtype("auto", "cuda") == torch.bfloat16
    with pytest.raises(UserError, match="unknown dtype"):
        precision.choose_dtype("int8", "cpu")
