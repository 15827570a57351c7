"""A figure of the docs in a PNG file, in the style of the reports."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peagle.errors import UserError
from peagle.paths import write_bytes
from peagle.report.charts import STYLE


def write_figure(path: Path, size: tuple[float, float], draw: Callable[[Any, Any], None]) -> None:
    """Let `draw` fill two axes side by side, and write them; `size` is in inches."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("the figure needs matplotlib: pip install 'peagle[bench]'") from error
    from matplotlib.figure import Figure

    style: Any = STYLE
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        draw(*figure.subplots(1, 2))
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=150, metadata={"Software": None})
        write_bytes(path, content.getvalue())
