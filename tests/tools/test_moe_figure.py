"""tools/moe_figure.py: acceptance profiles, the best K of each method, the figure."""

import json
from pathlib import Path

import pytest

from peagle.cli.measurement.bench_step import parse_profiles
from peagle.errors import UserError
from tools.moe_figure import (
    ACCEPTANCE_LENGTHS,
    draw,
    geometric_profile,
    markdown,
    profile_options,
    read_best,
    speedups,
)


def write_cells(path: Path, *cells: tuple[str, str, int, float]) -> Path:
    records = [
        {
            "method": method,
            "k": k,
            "concurrency": count,
            "tokens_per_second": speed,
            "acceptance_length": 3.0,
        }
        for method, k, count, speed in cells
    ]
    path.write_text(json.dumps({"cells": records}))
    return path


def test_profiles_have_the_published_acceptance_lengths() -> None:
    profile = geometric_profile(3.94)
    assert 1 + sum(profile) == pytest.approx(3.94) and len(profile) == 7
    assert profile[1] / profile[0] == pytest.approx(profile[0])
    profiles = parse_profiles([word for word in profile_options() if "=" in word])
    for method, length in ACCEPTANCE_LENGTHS.items():
        assert 1 + sum(profiles[method]) == pytest.approx(length, abs=1e-3)


def test_methods_are_compared_at_their_best_k(tmp_path: Path) -> None:
    first = write_cells(tmp_path / "a.json", ("p-eagle", "7", 1, 300.0), ("p-eagle", "3", 1, 200.0))
    second = write_cells(
        tmp_path / "b.json",
        ("eagle3", "2", 1, 150.0),
        ("eagle3", "3", 1, 200.0),
        ("p-eagle", "3", 64, 5000.0),
        ("eagle3", "1", 64, 4000.0),
        ("eagle3", "1", 8, 900.0),
    )
    best = read_best([first, second])
    assert best["p-eagle"][1].k == "7" and best["eagle3"][1].k == "3"
    assert speedups(best) == {1: 1.5, 64: 1.25}
    table = markdown(best)
    assert "| 1 | - | 200 (3) | 300 (7) | 1.50 | 1.55 |" in table
    assert "| 64 | - | 4,000 (1) | 5,000 (3) | 1.25 | 1.23 |" in table
    with pytest.raises(UserError, match="eagle3"):
        read_best([first])


def test_the_figure_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = [(m, "3", c, 100.0 * c) for m in ("none", "eagle3", "p-eagle") for c in (1, 8, 64)]
    best = read_best([write_cells(tmp_path / "cells.json", *cells)])
    draw(best, tmp_path / "moe.png")
    assert (tmp_path / "moe.png").read_bytes().startswith(b"\x89PNG")
