"""The fastest dtype is measured once per machine and target, and stored."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.errors import UserError
from peagle.kernels.cpu.library import KernelBuild
from peagle.target import precision
from peagle.target.matrix_shapes import DEFAULT_SHAPES, MatrixShapes, read_shapes
from peagle.target.precision import choose_candidate, measured_choice
from peagle.target.weight_speed import ROW_COUNTS, PassTimes

SMALL = MatrixShapes(64, 128, 64, 32, 2, 256)


def passes(**milliseconds: float) -> dict[str, PassTimes]:
    """The same time for every number of rows."""
    return {name: dict.fromkeys(ROW_COUNTS, t) for name, t in milliseconds.items()}


class CountedMeasure:
    def __init__(self, times: dict[str, PassTimes]) -> None:
        self.times = times
        self.calls: list[tuple[MatrixShapes, str | None]] = []

    def __call__(self, shapes: MatrixShapes, stored_format: str | None) -> dict[str, PassTimes]:
        self.calls.append((shapes, stored_format))
        return self.times


@pytest.fixture(autouse=True)
def peagle_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path))
    monkeypatch.setattr(precision, "is_overloaded", lambda: False)
    return tmp_path


def stored_file(home: Path) -> dict[str, Any]:
    return json.loads((home / "precision.json").read_text())


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (passes(float32=2, bfloat16=1), "bfloat16"),
        (passes(float32=1.05, bfloat16=1), "float32"),  # The gain is too small.
        (passes(float32=1, bfloat16=9), "float32"),
        (passes(Q4_1=1, float32=1, bfloat16=1), "Q4_1"),  # Stored weights are exact, and smaller.
        (passes(Q4_1=2, float32=1, bfloat16=0.95), "float32"),
        (passes(Q4_1=2, float32=3, bfloat16=1), "bfloat16"),
    ],
)
def test_precise_candidates_are_preferred(times: dict[str, PassTimes], expected: str) -> None:
    assert choose_candidate(times) == expected


def test_rows_of_verify_steps_count() -> None:
    """bfloat16 is slower with one row, but faster over all numbers of rows."""
    times = {"float32": {1: 5.0, 4: 10.0, 8: 20.0}, "bfloat16": {1: 6.0, 4: 7.0, 8: 8.0}}
    assert choose_candidate(times) == "bfloat16"


def test_measured_once_and_stored(peagle_home: Path) -> None:
    measure = CountedMeasure(passes(float32=2, bfloat16=1))
    for _ in range(2):
        assert measured_choice(None, measure=measure).dtype == torch.bfloat16
    assert measure.calls == [(DEFAULT_SHAPES, None)]
    choice = measured_choice(DEFAULT_SHAPES, measure=measure)
    assert choice.times == measure.times and len(measure.calls) == 1


def test_times_under_load_are_used_until_the_load_ends(
    peagle_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = CountedMeasure(passes(float32=2, bfloat16=1))
    idle = CountedMeasure(passes(float32=1, bfloat16=2))
    monkeypatch.setattr(precision, "is_overloaded", lambda: True)
    for _ in range(2):  # A second process chooses the same.
        assert measured_choice(SMALL, measure=busy).chosen == "bfloat16"
    monkeypatch.setattr(precision, "is_overloaded", lambda: False)
    for _ in range(2):
        assert measured_choice(SMALL, measure=idle).chosen == "float32"
    monkeypatch.setattr(precision, "is_overloaded", lambda: True)
    assert measured_choice(SMALL, measure=busy).chosen == "float32"
    assert len(busy.calls) == len(idle.calls) == 1


def test_every_shape_and_format_is_measured() -> None:
    measure = CountedMeasure(passes(float32=2, bfloat16=1))
    for shapes in (SMALL, DEFAULT_SHAPES):
        for stored_format in (None, "Q4_1", "Q8_0"):
            measured_choice(shapes, stored_format, measure)
    assert len(set(measure.calls)) == len(measure.calls) == 6


def test_the_shapes_are_those_of_the_target(tmp_path: Path) -> None:
    config = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    measure = CountedMeasure(passes(float32=2, bfloat16=1))
    measured_choice(read_shapes(tmp_path), measure=measure)
    assert measure.calls == [(SMALL, None)]


@pytest.mark.parametrize("content", ["{", "[]", "null", '{"x": {}}'])
def test_a_damaged_file_is_measured_again(peagle_home: Path, content: str) -> None:
    (peagle_home / "precision.json").write_text(content)
    choice = measured_choice(SMALL)
    assert choice.times.keys() == {"float32", "bfloat16"}
    assert stored_file(peagle_home).keys() >= {f"{choice.machine}, {SMALL.name}"}


def test_a_damaged_entry_is_measured_again(peagle_home: Path) -> None:
    measure = CountedMeasure(passes(float32=2, bfloat16=1))
    measured_choice(SMALL, measure=measure)
    key = next(iter(stored_file(peagle_home)))
    for entry in ({}, [], {"float32": {"1": 1}}, {"float32": {}, "bfloat16": {}}, None, "x"):
        (peagle_home / "precision.json").write_text(json.dumps({key: entry}))
        assert measured_choice(SMALL, measure=measure).times == measure.times
    assert len(measure.calls) == 7


def test_containers_with_new_host_names_share_one_measurement(
    peagle_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = CountedMeasure(passes(float32=2, bfloat16=1))
    for host in range(5):
        monkeypatch.setattr(platform, "node", lambda host=host: f"pod-{host}")
        measured_choice(SMALL, measure=measure)
    assert len(measure.calls) == len(stored_file(peagle_home)) == 1


def test_other_kernels_are_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = CountedMeasure(passes(float32=2, bfloat16=1))
    for state in ("c, avx2", "pytorch: PEAGLE_NATIVE=0"):
        monkeypatch.setattr(precision, "kernel_state", lambda state=state: state)
        measured_choice(SMALL, measure=measure)
    assert len(measure.calls) == 2


def test_changed_kernels_are_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels have another cache key, but the same state, such as `c, avx2`."""
    measure = CountedMeasure(passes(float32=2, bfloat16=1))
    built = KernelBuild("native", "avx2", 256, (), "gcc", "12")
    monkeypatch.setattr(precision, "kernel_build", lambda: built)
    for key in ("before", "after", "after"):
        monkeypatch.setattr(precision, "cache_key", lambda *_, key=key: key)
        measured_choice(SMALL, measure=measure)
    assert len(measure.calls) == 2


def test_the_file_is_bounded(peagle_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries of the newest kinds of machines are kept."""
    measure = CountedMeasure(passes(float32=2, bfloat16=1))
    for kind in range(precision.MAX_STORED + 20):
        monkeypatch.setattr(precision, "cpu_name", lambda kind=kind: f"kind-{kind}")
        measured_choice(SMALL, measure=measure)
    stored = list(stored_file(peagle_home))
    assert len(stored) == precision.MAX_STORED
    assert stored[0].startswith("kind-20 ") and stored[-1].startswith("kind-83 ")


def test_a_read_only_folder_measures_every_time(
    peagle_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("read-only")

    monkeypatch.setattr(precision, "write_json", refuse)
    measure = CountedMeasure(passes(float32=2, bfloat16=1))
    for _ in range(2):
        measured_choice(SMALL, measure=measure)
    assert len(measure.calls) == 2


@pytest.mark.parametrize(("load", "expected"), [(1.0, False), (2.1, False), (2.5, True)])
def test_overload_is_a_load_above_the_cores(
    load: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # Restore `is_overloaded`.
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(precision, "available_cores", lambda: 2)
    assert precision.is_overloaded() == expected


def test_the_choice_is_explained() -> None:
    choice = measured_choice(SMALL, "Q4_1", CountedMeasure(passes(float32=9, bfloat16=8, Q4_1=3)))
    assert choice.text == ("Q4_1: 3 ms for a pass of 8 rows; float32: 9 ms; bfloat16: 8 ms")
    assert choice.stored and choice.dtype == torch.float32
    assert choice.as_dict()["pass_ms"]["Q4_1"] == {"1": 3, "4": 3, "8": 3}


def test_choose_dtype() -> None:
    assert precision.choose_dtype("bfloat16", "cpu") == torch.bfloat16
    assert precision.choose_dtype("auto", "cuda") == torch.bfloat16
    with pytest.raises(UserError, match="unknown dtype"):
        precision.choose_dtype("int8", "cpu")
