"""Figures drawn by matplotlib: as SVG with the page's CSS variables for colors, and as PNG."""

import io
import re
from html import escape
from typing import TYPE_CHECKING, Any

from peagle.errors import UserError
from peagle.report.figure import Figure, Line
from peagle.report.palette import LIGHT, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE_SIZE = (4.6, 3.5)  # inches
PNG_DPI = 160
MAX_CAPTION_CHARACTERS = 92
DASHES = (0, (4, 2))
DOTS = (0, (1, 1.5))
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


def draw(figure: Figure, png_caption: str | None = None) -> tuple[str, bytes]:
    """SVG without a title (the page has a heading), and PNG with a title if there is a caption.

    The same numbers give the same bytes.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("charts need matplotlib: pip install 'peagle[bench]'") from error
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    style: Any = STYLE | {"svg.hashsalt": figure.name}
    with matplotlib.rc_context(style):
        canvas = Canvas(figsize=FIGURE_SIZE, layout="constrained", facecolor="none")
        axes = canvas.add_subplot()
        draw_lines(axes, figure)
        draw_legend(axes, figure)
        svg = io.StringIO()
        FigureCanvasSVG(canvas).print_svg(svg, metadata={"Date": None, "Creator": None})
        if png_caption is None:
            return svg.getvalue(), b""
        canvas.suptitle(figure.title, x=0.02, ha="left", weight="bold", fontsize=11)
        caption = shorten(png_caption, MAX_CAPTION_CHARACTERS)
        canvas.supxlabel(caption, x=0.02, ha="left", fontsize=7.5, color=LIGHT["muted"])
        canvas.set_facecolor("white")
        png = io.BytesIO()
        canvas.dpi = PNG_DPI
        FigureCanvasAgg(canvas).print_png(png, metadata={"Software": None})
    return svg.getvalue(), png.getvalue()


def shorten(text: str, max_characters: int) -> str:
    return text if len(text) <= max_characters else f"{text[: max_characters - 1]}…"


def draw_lines(axes: "Axes", figure: Figure) -> None:
    if figure.baseline is not None:
        axes.axhline(figure.baseline, color=LIGHT["none"], linewidth=1.2, linestyle=DOTS)
    for i, line in enumerate(figure.lines):
        # The first line is on top, so that long lines do not hide short ones.
        draw_line(axes, line, figure, zorder=4 - i / 100)
    axes.set(xlabel=figure.xlabel, ylabel=figure.ylabel)
    set_scales(axes, figure)
    if figure.baseline is None and not figure.log:
        axes.set_ylim(bottom=0)


def line_style(line: Line, figure: Figure) -> dict[str, Any]:
    """The style of a line and its markers.

    A Pareto front is a thin line of rings around the markers of other lines.
    """
    color = LIGHT[line.color]
    is_front = line.color == "ink" and figure.log
    return {
        "color": color,
        "linestyle": "none" if not line.joined else DASHES if line.dashed else "-",
        "linewidth": 1.2 if is_front else 1.8,
        "marker": "o" if is_front else MARKERS[line.color],
        "markersize": 9 if is_front else 8 if line.color == "ink" else 5.5,
        "markerfacecolor": "none" if is_front else color,
        "markeredgecolor": color if is_front else LIGHT["card"],
        "markeredgewidth": 1.2 if is_front else 0.6,
    }


def draw_line(axes: "Axes", line: Line, figure: Figure, zorder: float) -> None:
    below = [max(0.0, p.y - p.low) if p.low is not None else 0.0 for p in line.points]
    above = [max(0.0, p.high - p.y) if p.high is not None else 0.0 for p in line.points]
    axes.errorbar(
        [point.x for point in line.points],
        [point.y for point in line.points],
        yerr=[below, above] if any(below) or any(above) else None,
        elinewidth=1,
        capsize=2.2,
        zorder=zorder,
        clip_on=False,
        **line_style(line, figure),
    )
    for point in line.points:
        if point.text:  # above and to the right of a front there are no other points
            axes.annotate(
                point.text,
                (point.x, point.y),
                fontsize=8,
                color=LIGHT["muted"],
                xytext=(5, 4),
                textcoords="offset points",
            )


def draw_legend(axes: "Axes", figure: Figure) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], label=line.label, **line_style(line, figure)) for line in figure.lines
    ]
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(-0.06, 1.0),
        ncols=3 if len(handles) > 4 else 2,
        borderaxespad=0.2,
    )


def set_scales(axes: "Axes", figure: Figure) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    if figure.log:
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    if figure.ticks:
        linear = figure.xlabel == "K" or "position" in figure.xlabel
        if figure.ticks[-1] >= 8 * figure.ticks[0] and not linear:
            axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(figure.ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def inline_svg(svg: str, name: str, title: str, description: str) -> str:
    """An SVG to embed in a page: colors as variables, its font, unique ids, no fixed size."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[a-zA-Z]+_\d+">', "<g>", svg)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    for color, value in LIGHT.items():
        svg = re.sub(rf"{value}\b", f"var(--{color})", svg, flags=re.IGNORECASE)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    svg = re.sub(r"<[^>]*>", lambda tag: round_coordinates(tag[0]), svg)
    view_box = re.search(r'viewBox="([^"]+)"', svg)
    assert view_box is not None
    opening = (
        f'<svg viewBox="{view_box[1]}" class="chart" role="img"'
        f' aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-desc">{escape(description)}</desc>'
    )
    return re.sub(r"<svg\b[^>]*>", lambda _: opening, svg, count=1)


def round_coordinates(tag: str) -> str:
    return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", tag)
