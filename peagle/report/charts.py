"""Figures drawn by matplotlib: as SVG whose colors are the page's CSS variables, and as PNG on white."""

import io
import re
from html import escape
from typing import TYPE_CHECKING, Any

from peagle.errors import UserError
from peagle.report.figures import Figure, Line
from peagle.report.palette import LIGHT, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (4.6, 3.5)
STYLE: dict[str, Any] = {
    "font.size": 9.5,
    "font.family": "DejaVu Sans",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "text.color": LIGHT["ink"],
    "axes.edgecolor": LIGHT["rule"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["rule"],
    "grid.linewidth": 0.7,
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.9,
    "legend.columnspacing": 1.0,
    "legend.labelspacing": 0.3,
}


def draw(figure: Figure, picture: str | None = None) -> tuple[str, bytes]:
    """SVG without a title (the page has a heading); PNG, if given a caption, with one. Same numbers, same bytes."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError(
            "a report needs matplotlib: pip install 'peagle[bench]', or use --markdown"
        ) from error
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    style: Any = STYLE | {"svg.hashsalt": figure.name}
    with matplotlib.rc_context(style):
        canvas = Canvas(figsize=SIZE, layout="constrained", facecolor="none")
        axes = canvas.add_subplot()
        fill(axes, figure)
        legend(axes, figure)
        svg = io.StringIO()
        FigureCanvasSVG(canvas).print_svg(svg, metadata={"Date": None, "Creator": None})
        if picture is None:
            return svg.getvalue(), b""
        canvas.suptitle(figure.title, x=0.02, ha="left", weight="bold", fontsize=11)
        canvas.supxlabel(shorten(picture), x=0.02, ha="left", fontsize=7.5, color=LIGHT["muted"])
        canvas.set_facecolor("white")
        png = io.BytesIO()
        canvas.dpi = 160
        FigureCanvasAgg(canvas).print_png(png, metadata={"Software": None})
    return svg.getvalue(), png.getvalue()


def shorten(text: str, most: int = 92) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def fill(axes: "Axes", figure: Figure) -> None:
    if figure.baseline is not None:
        axes.axhline(figure.baseline, color=LIGHT["none"], linewidth=1.2, linestyle=(0, (1, 1.5)))
    for i, line in enumerate(figure.lines):
        add(
            axes, line, figure, zorder=4 - i / 100
        )  # the first on top: short lines are not hidden by long ones
    axes.set(xlabel=figure.xlabel, ylabel=figure.ylabel)
    scale(axes, figure)
    if figure.baseline is None and not figure.log:
        axes.set_ylim(bottom=0)


def look(line: Line, figure: Figure) -> dict[str, Any]:
    """Of a line and its markers. A Pareto front is a thin line of rings around other lines' markers."""
    color, front = LIGHT[line.color], line.color == "ink" and figure.log
    return {
        "color": color,
        "linestyle": "none" if not line.joined else (0, (4, 2)) if line.dashed else "-",
        "linewidth": 1.2 if front else 1.8,
        "marker": "o" if front else MARKERS[line.color],
        "markersize": 9 if front else 8 if line.color == "ink" else 5.5,
        "markerfacecolor": "none" if front else color,
        "markeredgecolor": color if front else LIGHT["card"],
        "markeredgewidth": 1.2 if front else 0.6,
    }


def add(axes: "Axes", line: Line, figure: Figure, zorder: float) -> None:
    x, y = [point.x for point in line.points], [point.y for point in line.points]
    below = [max(0.0, p.y - p.low) if p.low is not None else 0.0 for p in line.points]
    above = [max(0.0, p.high - p.y) if p.high is not None else 0.0 for p in line.points]
    bars = [below, above] if any(below) or any(above) else None
    how = look(line, figure)
    axes.errorbar(x, y, yerr=bars, elinewidth=1, capsize=2.2, zorder=zorder, clip_on=False, **how)
    for point in line.points:
        if point.text:  # right above a front there is nothing
            offset: dict[str, Any] = {"xytext": (5, 4), "textcoords": "offset points"}
            axes.annotate(
                point.text, (point.x, point.y), fontsize=8, color=LIGHT["muted"], **offset
            )


def legend(axes: "Axes", figure: Figure) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=line.label, **look(line, figure)) for line in figure.lines]
    columns = 3 if len(handles) > 4 else 2
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(-0.06, 1.0),
        ncols=columns,
        borderaxespad=0.2,
    )


def scale(axes: "Axes", figure: Figure) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    if figure.log:
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    if figure.ticks:
        if (
            figure.ticks[-1] >= 8 * figure.ticks[0]
            and figure.xlabel != "K"
            and "position" not in figure.xlabel
        ):
            axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(figure.ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def inline(svg: str, name: str, title: str, words: str) -> str:
    """An SVG for the inside of a page: colors as variables, the page's font, ids of its own, no size of its own."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[a-zA-Z]+_\d+">', "<g>", svg)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    for color, value in LIGHT.items():
        svg = re.sub(rf"{value}\b", f"var(--{color})", svg, flags=re.IGNORECASE)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    svg = re.sub(
        r"<[^>]*>", lambda tag: re.sub(r"\d+\.\d{3,}", lambda x: f"{float(x[0]):.2f}", tag[0]), svg
    )
    box = re.search(r'viewBox="([^"]+)"', svg)
    assert box is not None
    opening = (
        f'<svg viewBox="{box[1]}" class="chart" role="img" aria-labeledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(words)}</desc>'
    )
    return re.sub(r"<svg\b[^>]*>", lambda _: opening, svg, count=1)
