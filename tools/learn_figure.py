"""The figure of docs/learn.md: acceptance lengths before and after, and tokens/s while it learns.

python -m tools.learn_figure docs/results/h200-learn/rows.jsonl [--out docs/learn.png]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from peagle.errors import UserError
from peagle.report.palette import LIGHT
from tools.figure_file import write_figure

KINDS = {0: ("greedy", "p-eagle"), 1: ("sampled", "s0")}  # of waves: label and color
Row = dict[str, Any]


def read_rows(file: Path) -> dict[str, list[Row]]:
    """The rows of benchmarks/learning/h200.py by their part."""
    parts: dict[str, list[Row]] = {"baseline": [], "learn": [], "report": []}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        parts.setdefault(row["part"], []).append(row)
    if missing := [name for name in ("learn", "report") if not parts[name]]:
        raise UserError(
            f"{file} has no rows of the part {missing[0]}: run benchmarks.learning.h200"
        )
    return parts


def wave_ends(waves: list[Row]) -> list[float]:
    """Minutes of serving until the end of each wave."""
    ends, seconds = [], 0.0
    for wave in waves:
        seconds += wave["seconds"]
        ends.append(seconds / 60)
    return ends


def promotions(waves: list[Row]) -> dict[int, float]:
    """Minutes after which each version served."""
    first: dict[int, float] = {}
    for wave, end in zip(waves, wave_ends(waves), strict=True):
        if wave["version_after"]:
            first.setdefault(wave["version_after"], end)
    return first


def draw(parts: dict[str, list[Row]], path: Path) -> None:
    def fill(left: Any, right: Any) -> None:
        draw_lengths(left, parts["report"])
        draw_speeds(right, parts["learn"])

    write_figure(path, (9.4, 3.8), fill)


def draw_lengths(axes: Any, sets: list[Row]) -> None:
    for offset, key, color, label in (
        (-0.2, "before", LIGHT["none"], "shipped"),
        (0.2, "after", LIGHT["p-eagle"], f"version {sets[0]['version']}"),
    ):
        places = [i + offset for i in range(len(sets))]
        bars = axes.bar(places, [row[key] for row in sets], 0.38, color=color, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, color=LIGHT["muted"])
    axes.set_xticks(range(len(sets)), [row["set"] for row in sets])
    axes.set_title("acceptance length at K=7 on held-out prompts")
    axes.margins(y=0.15)
    axes.legend(ncols=2)


def draw_speeds(axes: Any, waves: list[Row]) -> None:
    ends = wave_ends(waves)
    for kind, (label, color) in KINDS.items():
        chosen = [i for i, wave in enumerate(waves) if wave["wave"] % 2 == kind]
        speeds = [waves[i]["tokens_per_second"] / 1000 for i in chosen]
        axes.plot([ends[i] for i in chosen], speeds, ".-", color=LIGHT[color], label=label)
    for version, minute in promotions(waves).items():
        axes.axvline(minute, color=LIGHT["rule"], linewidth=1)
        axes.annotate(f"v{version}", (minute, 4), fontsize=8, color=LIGHT["muted"])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes of serving")
    axes.set_title("1,000 tokens/s while the server learns, 64 streams")
    axes.legend(loc="center right")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/learn.png"))
    options = parser.parse_args()
    draw(read_rows(options.rows), options.out)


if __name__ == "__main__":
    main()
