"""The figure of docs/science.md: acceptance lengths as bars, acceptance by position, speed against no drafts."""

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

MAIN = (
    "eagle3",
    "paper",
    "p-eagle",
    "dflash",
    "dependency",
    "combined",
)  # whose positions and speeds are drawn
COLOURS = dict(zip(MAIN, ("eagle3", "s4", "p-eagle", "s3", "s0", "s2"), strict=True))
K, TREE = 7, "tree 31, "


class Rung(Protocol):
    """What is drawn of a rung (comparison.py)."""

    name: str
    label: str
    target: str
    trained: bool
    engine: list[dict[str, Any]]

    def lengths(self, k: int, only: str | None = None, tree: str = "") -> list[float]: ...
    def positions(self, k: int) -> list[float]: ...


def draw(rungs: Sequence[Any], path: Path) -> None:
    """PATH.svg and PATH.png, of the target with the most runs."""
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
    """The mean over seeds; each seed a dot; behind it, pale, the tree."""
    places = range(len(rungs))
    colors = [LIGHT[COLOURS.get(rung.name, "none")] for rung in rungs]
    axes.barh(
        places, [mean(rung.lengths(K)) for rung in rungs], color=colors, height=0.65, zorder=2
    )
    for place, rung, color in zip(places, rungs, colors, strict=True):
        values, branched = rung.lengths(K), rung.lengths(K, tree=TREE)
        if len(values) > 1:
            axes.plot(
                values, [place] * len(values), "o", color=LIGHT["ink"], markersize=3, zorder=3
            )
        word, end = f" {mean(values):.2f}", max(values)
        if branched:
            axes.barh(place, mean(branched), color=color, alpha=0.3, height=0.65)
            word, end = f" {mean(values):.2f}, {TREE[:-2]}: {mean(branched):.2f}", mean(branched)
        axes.annotate(word, (end, place), va="center", fontsize=8, color=LIGHT["muted"])
    axes.set_yticks(places, [rung.label for rung in rungs], fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.35)
    axes.set(xlabel=f"acceptance length, K={K}, mean over sets", xlim=(1, None))


def curves(axes: "Axes", rungs: Sequence[Rung]) -> None:
    for rung in rungs:
        shares = rung.positions(11)
        axes.plot(range(1, len(shares) + 1), shares, label=rung.label, **look(rung))
    axes.set(
        xlabel="position of the draft, K=11", ylabel="share of passes that accept it", ylim=(0, 1)
    )


def speeds(axes: "Axes", rungs: Sequence[Rung]) -> None:
    """Of the first set that was measured, against no drafts; trees dashed."""
    plain = next(rung.engine[0] for rung in rungs if rung.name == "none")
    for rung in rungs:
        for one in (
            one for one in rung.engine if one["set"] == plain["set"] and rung.name != "none"
        ):
            ratios = {
                int(c): rate / plain["tokens_per_second"][c]
                for c, rate in one["tokens_per_second"].items()
            }
            dashed = one["shape"].startswith("tree")
            axes.plot(
                [*ratios], [*ratios.values()], **look(rung), linestyle="--" if dashed else "-"
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


def look(rung: Rung) -> dict[str, Any]:
    color = COLOURS.get(rung.name, "none")
    return {"color": LIGHT[color], "marker": MARKERS.get(color, "o"), "markersize": 5}
