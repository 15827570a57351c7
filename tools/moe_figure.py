"""The figure of docs/moe.md: P-EAGLE over EAGLE-3, each at its best K, on a mixture of experts.

    python -m tools.moe_figure CELLS.json ... [--out docs/moe.png]    # files of bench-step --out
    python -m tools.moe_figure --profiles    # prints the options --profile of these measurements

It prints the table of that page. Profiles are geometric: every draft is accepted with the same
probability r, given the ones before it, so position i has r^i; r is such that 1 + r + ... + r^7 is
the published acceptance length at K = 7. Shorter drafts take the first positions of the same
profile.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.errors import UserError
from peagle.report.palette import LIGHT, MARKERS
from tools.figure_file import write_figure

K = 7
ACCEPTANCE_LENGTHS = {"p-eagle": 3.94, "eagle3": 3.03}  # HumanEval, GPT-OSS-20B, K = 7
PUBLISHED = {1: 1.55, 64: 1.23}  # P-EAGLE over EAGLE-3 on HumanEval, GPT-OSS-20B on a B200


@dataclass(frozen=True, slots=True)
class BestCell:
    """The fastest K of a method at one concurrency."""

    tokens_per_second: float
    k: str
    acceptance_length: float


def geometric_profile(acceptance_length: float, k: int = K) -> list[float]:
    """The shares r, r^2, .. r^k whose sum is the acceptance length less 1."""
    low, high = 0.0, 1.0
    for _ in range(60):
        r = (low + high) / 2
        if 1 + sum(r**i for i in range(1, k + 1)) < acceptance_length:
            low = r
        else:
            high = r
    return [high**i for i in range(1, k + 1)]


def profile_options() -> list[str]:
    """--profile p-eagle=0.8033,.. --profile eagle3=0.7,.."""
    words = []
    for method, length in ACCEPTANCE_LENGTHS.items():
        numbers = ",".join(f"{share:.4f}" for share in geometric_profile(length))
        words += ["--profile", f"{method}={numbers}"]
    return words


def read_best(files: Sequence[Path]) -> dict[str, dict[int, BestCell]]:
    """By method and concurrency."""
    best: dict[str, dict[int, BestCell]] = {}
    for file in files:
        for record in json.loads(file.read_text())["cells"]:
            by_count = best.setdefault(record["method"], {})
            cell = BestCell(record["tokens_per_second"], record["k"], record["acceptance_length"])
            known = by_count.get(record["concurrency"])
            if known is None or cell.tokens_per_second > known.tokens_per_second:
                by_count[record["concurrency"]] = cell
    missing = [method for method in ACCEPTANCE_LENGTHS if method not in best]
    if missing:
        raise UserError(f"no cells of {', '.join(missing)}: give the files of both methods")
    return best


def speedups(best: dict[str, dict[int, BestCell]]) -> dict[int, float]:
    """P-EAGLE over EAGLE-3 by concurrency, where both were measured."""
    parallel, sequential = best["p-eagle"], best["eagle3"]
    return {
        count: parallel[count].tokens_per_second / sequential[count].tokens_per_second
        for count in sorted(parallel.keys() & sequential.keys())
    }


def markdown(best: dict[str, dict[int, BestCell]]) -> str:
    lines = [
        "| requests | none | EAGLE-3 (K) | P-EAGLE (K) | P-EAGLE / EAGLE-3 | published, B200 |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for count, ratio in speedups(best).items():
        plain = best.get("none", {}).get(count)
        cells = [
            str(count),
            "-" if plain is None else f"{plain.tokens_per_second:,.0f}",
            *(
                f"{best[method][count].tokens_per_second:,.0f} ({best[method][count].k})"
                for method in ("eagle3", "p-eagle")
            ),
            f"{ratio:.2f}",
            f"{PUBLISHED[count]:.2f}" if count in PUBLISHED else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(best: dict[str, dict[int, BestCell]], path: Path) -> None:
    def fill(left: Any, right: Any) -> None:
        draw_ratio(left, speedups(best))
        draw_speeds(right, best)

    write_figure(path, (9.4, 4.2), fill)


def draw_ratio(axes: Any, ratios: dict[int, float]) -> None:
    axes.plot([*ratios], [*ratios.values()], label="here, one H200", **line_style("p-eagle"))
    axes.plot(
        [*PUBLISHED],
        [*PUBLISHED.values()],
        label="published, B200",
        linestyle="--",
        **line_style("none"),
    )
    for values, offset in ((ratios, 6), (PUBLISHED, -13)):
        for count, ratio in values.items():
            axes.annotate(
                f"{ratio:.2f}",
                (count, ratio),
                xytext=(0, offset),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=LIGHT["muted"],
            )
    axes.axhline(1, color=LIGHT["muted"], linewidth=1)
    axes.margins(y=0.2)
    axes.legend()
    label_axes(axes, [*ratios], "P-EAGLE over EAGLE-3, each at its best K")


def draw_speeds(axes: Any, best: dict[str, dict[int, BestCell]]) -> None:
    labels = {"none": "no drafts", "eagle3": "EAGLE-3", "p-eagle": "P-EAGLE"}
    for method, label in labels.items():
        cells = dict(sorted(best.get(method, {}).items()))
        speeds = [cell.tokens_per_second for cell in cells.values()]
        if speeds:
            axes.plot([*cells], speeds, label=label, **line_style(method))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend()
    label_axes(axes, [*best["p-eagle"]], "tokens/s")


def label_axes(axes: Any, counts: list[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set(xlabel="requests at a time", ylabel=label)
    axes.set_xticks(sorted({*counts, *PUBLISHED}), [str(x) for x in sorted({*counts, *PUBLISHED})])
    axes.minorticks_off()


def line_style(color: str) -> dict[str, Any]:
    return {"color": LIGHT[color], "marker": MARKERS.get(color, "o"), "markersize": 5}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="JSON of bench-step --out")
    parser.add_argument("--out", type=Path, default=Path("docs/moe.png"))
    parser.add_argument("--profiles", action="store_true", help="print the profiles, and end")
    options = parser.parse_args()
    if options.profiles:
        print(" ".join(profile_options()))
        return
    if not options.files:
        parser.error("give files of bench-step, or --profiles")
    best = read_best(options.files)
    draw(best, options.out)
    print(markdown(best))


if __name__ == "__main__":
    main()
