"""tools/learn_figure.py: promotion times of versions, and the figure of the documentation."""

import json
from pathlib import Path

import pytest

from peagle.errors import UserError
from tools.learn_figure import draw, promotions, read_rows

RECORD = Path(__file__).parents[2] / "docs/results/h200-learn/rows.jsonl"


def test_a_version_is_used_from_the_end_of_its_wave() -> None:
    waves = [{"seconds": 60.0, "version_after": version} for version in (0, 1, 1, 3)]
    assert promotions(waves) == {1: 2.0, 3: 4.0}


def test_rows_without_a_report_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"part": "learn"}) + "\n")
    with pytest.raises(UserError, match="no rows of the part report"):
        read_rows(file)


def test_the_figure_of_the_documentation(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    parts = read_rows(RECORD)
    assert list(promotions(parts["learn"])) == [1, 2, 3, 4]
    draw(parts, tmp_path / "learn.png")
    assert (tmp_path / "learn.png").read_bytes().startswith(b"\x89PNG")
