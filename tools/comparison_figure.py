"""The figure of docs/science.md: acceptance lengths as bars, acceptance by position, tokens a second."""

import io
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Protocol

from peagle.errors import UserError
from peagle.home import write_bytes
from peagle.report.charts import STYLE
from peagle.report.palette import LIGHT, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAIN = ("eagle3", "paper", "p-eagle", "dflash", "dependency", "combined")  # whose positions and speeds are drawn
COLOURS = dict(zip(MAIN, ("eagle3", "s4", "p-eagle", "s3", "s0", "s2"), strict=True))
K = 7


class Rung(Protocol):
    """What is drawn of a rung (comparison.py)."""

    name: str
    label: str
    target: str
    trained: bool
    engine: list[dict[str, Any]]

    def lengths(self, k: int) -> list[float]: ...
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
        panels = 3 if timed else 2
        figure = Figure(figsize=(4.7 * panels, 5), layout="constrained", facecolor="white")
        axes = figure.subplots(1, panels)
        bars(axes[0], [rung for rung in own if rung.trained])
        curves(axes[1], [rung for rung in own if rung.trained and rung.name in MAIN])
        if timed:
            speeds(axes[2], timed)
        handles, labels = axes[1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))
        for ending, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
            content = io.BytesIO()
            figure.savefig(content, format=ending, dpi=150, metadata=metadata)
            write_bytes(path.with_suffix(f".{ending}"), content.getvalue())


def bars(axes: "Axes", rungs: Sequence[Rung]) -> None:
    """The mean over seeds; each seed a dot."""
    places = range(len(rungs))
    colours = [LIGHT[COLOURS.get(rung.name, "none")] for rung in rungs]
    axes.barh(places, [mean(rung.lengths(K)) for rung in rungs], color=colours, height=0.65)
    for place, rung in zip(places, rungs, strict=True):
        values = rung.lengths(K)
        if len(values) > 1:
            axes.plot(values, [place] * len(values), "o", color=LIGHT["ink"], markersize=3)
        axes.annotate(f" {mean(values):.2f}", (max(values), place), va="center", fontsize=8.5, color=LIGHT["muted"])
    axes.set_yticks(places, [rung.label for rung in rungs], fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel=f"acceptance length, K={K}, mean over sets", xlim=(1, None))


def curves(axes: "Axes", rungs: Sequence[Rung]) -> None:
    for rung in rungs:
        shares = rung.positions(11)
        axes.plot(range(1, len(shares) + 1), shares, label=rung.label, **look(rung))
    axes.set(xlabel="position of the draft, K=11", ylabel="share of passes that accept it", ylim=(0, 1))


def speeds(axes: "Axes", rungs: Sequence[Rung]) -> None:
    """Of the first set that was measured; trees dashed."""
    from matplotlib.ticker import LogLocator

    for rung in rungs:
        for one in rung.engine:
            if one["set"] == rung.engine[0]["set"]:
                x, y = [int(c) for c in one["tokens_per_second"]], list(one["tokens_per_second"].values())
                axes.plot(x, y, **look(rung), linestyle="--" if one["shape"].startswith("tree") else "-")
                if one["shape"] == "K=0" or one["shape"].startswith("tree"):
                    word = "no drafts" if one["shape"] == "K=0" else one["shape"]
                    axes.annotate(word, (x[0], y[0]), xytext=(4, 4), textcoords="offset points", fontsize=8)
    ticks = sorted({int(c) for rung in rungs for one in rung.engine for c in one["tokens_per_second"]})
    axes.set(xlabel="requests at a time", ylabel="tokens/s", xscale="log", yscale="log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.minorticks_off()


def look(rung: Rung) -> dict[str, Any]:
    colour = COLOURS.get(rung.name, "none")
    return {"color": LIGHT[colour], "marker": MARKERS.get(colour, "o"), "markersize": 5}
