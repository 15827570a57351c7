"""The figure of docs/science.md: acceptance lengths, acceptance by position, and speed."""

import io
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Protocol

from peagle.errors import UserError
from peagle.paths import write_bytes
from peagle.report.charts import STYLE
from peagle.report.palette import LIGHT, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The runs whose positions and speeds are drawn.
MAIN = ("eagle3", "paper", "p-eagle", "dflash", "dependency", "combined")
COLORS = dict(zip(MAIN, ("eagle3", "s4", "p-eagle", "s3", "s0", "s2"), strict=True))
K = 7
TREE = "tree 31, "


class Rung(Protocol):
    """The part of a rung (comparison.py) that is drawn."""

    name: str
    label: str
    target: str
    trained: bool
    engine: list[dict[str, Any]]

    def lengths(self, k: int, only: str | None = None, tree: str = "") -> list[float]: ...
    def positions(self, k: int) -> list[float]: ...


def draw(rungs: Sequence[Any], path: Path) -> None:
    """Write PATH.svg and PATH.png for the target with the most runs."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("the figure needs matplotlib: pip install 'peagle[bench]'") from error
    from matplotlib.figure import Figure

    targets = [rung.target for rung in rungs]
    own = [rung for rung in rungs if rung.target == max(set(targets), key=targets.count)]
    style: Any = STYLE | {"svg.hashsalt": "comparison"}
    with matplotlib.rc_context(style):
        timed = [rung for rung in own if rung.engine and rung.name in (*MAIN, "none")]
        timed = timed if any(rung.name == "none" for rung in timed) else []
        panels = 3 if timed else 2
        figure = Figure(figsize=(4.7 * panels, 5), layout="constrained", facecolor="white")
        axes = figure.subplots(1, panels)
        bars(axes[0], [rung for rung in own if rung.trained])
        curves(axes[1], [rung for rung in own if rung.trained and rung.name in MAIN])
        if timed:
            speeds(axes[2], timed)
        handles, labels = axes[1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))
        for ending, metadata in (
            ("svg", {"Date": None, "Creator": None}),
            ("png", {"Software": None}),
        ):
            content = io.BytesIO()
            figure.savefig(content, format=ending, dpi=150, metadata=metadata)
            write_bytes(path.with_suffix(f".{ending}"), content.getvalue())


def bars(axes: "Axes", rungs: Sequence[Rung]) -> None:
    """Bars of the mean over seeds, dots of each seed, and pale bars of the tree."""
    rows = range(len(rungs))
    colors = [LIGHT[COLORS.get(rung.name, "none")] for rung in rungs]
    axes.barh(rows, [mean(rung.lengths(K)) for rung in rungs], color=colors, height=0.65, zorder=2)
    for row, rung, color in zip(rows, rungs, colors, strict=True):
        values = rung.lengths(K)
        branched = rung.lengths(K, tree=TREE)
        if len(values) > 1:
            axes.plot(values, [row] * len(values), "o", color=LIGHT["ink"], markersize=3, zorder=3)
        word = f" {mean(values):.2f}"
        end = max(values)
        if branched:
            axes.barh(row, mean(branched), color=color, alpha=0.3, height=0.65)
            word = f" {mean(values):.2f}, {TREE[:-2]}: {mean(branched):.2f}"
            end = mean(branched)
        axes.annotate(word, (end, row), va="center", fontsize=8, color=LIGHT["muted"])
    axes.set_yticks(rows, [rung.label for rung in rungs], fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.35)
    axes.set(xlabel=f"acceptance length, K={K}, mean over sets", xlim=(1, None))


def curves(axes: "Axes", rungs: Sequence[Rung]) -> None:
    for rung in rungs:
        shares = rung.positions(11)
        axes.plot(range(1, len(shares) + 1), shares, label=rung.label, **line_style(rung))
    axes.set(
        xlabel="position of the draft, K=11", ylabel="share of passes that accept it", ylim=(0, 1)
    )


def speeds(axes: "Axes", rungs: Sequence[Rung]) -> None:
    """Speeds of the first measured set, relative to no drafts; trees are dashed."""
    plain = next(rung.engine[0] for rung in rungs if rung.name == "none")
    for rung in rungs:
        if rung.name == "none":
            continue
        for entry in rung.engine:
            if entry["set"] != plain["set"]:
                continue
            ratios = {
                int(c): rate / plain["tokens_per_second"][c]
                for c, rate in entry["tokens_per_second"].items()
            }
            dashed = entry["shape"].startswith("tree")
            axes.plot(
                [*ratios], [*ratios.values()], **line_style(rung), linestyle="--" if dashed else "-"
            )
    ticks = sorted(map(int, plain["tokens_per_second"]))
    axes.axhline(1, color=LIGHT["muted"], linewidth=1)
    axes.set(
        xlabel=f"requests at a time, {plain['set']}; dashed: trees",
        ylabel="tokens/s, times no drafts",
        xscale="log",
    )
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()


def line_style(rung: Rung) -> dict[str, Any]:
    color = COLORS.get(rung.name, "none")
    return {"color": LIGHT[color], "marker": MARKERS.get(color, "o"), "markersize": 5}
