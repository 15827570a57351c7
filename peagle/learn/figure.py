"""A figure of the versions: acceptance length over time, before and after each round."""

import datetime
from collections.abc import Sequence
from pathlib import Path

from peagle.errors import UserError
from peagle.learn.versions import VersionRecord
from peagle.train.curves import import_pyplot, save_figure

COLORS = {"promoted": "tab:green", "candidate": "tab:blue", "rejected": "tab:gray"}
ROLLED_BACK_COLOR = "tab:red"


def draw_versions(records: Sequence[VersionRecord], path: Path) -> None:
    """Draw every judged version on the held-back answers of its time."""
    pyplot = import_pyplot()
    if pyplot is None:
        raise UserError("the figure needs matplotlib: pip install 'peagle[train]'")
    figure, axis = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    judged = [record for record in records if record.held_back is not None]
    for record in judged:
        held_back = record.held_back
        assert held_back is not None
        when = datetime.datetime.fromtimestamp(record.time)
        color = COLORS.get(record.state, ROLLED_BACK_COLOR)
        bounds = [held_back.before * held_back.low, held_back.before * held_back.high]
        axis.plot([when, when], bounds, color=color, linewidth=2, alpha=0.5)
        axis.plot(when, held_back.after, "o", color=color)
        axis.plot(when, held_back.before, "_", color="black", markersize=12)
        label = f"{record.number} ({record.state})"
        axis.annotate(label, (when, bounds[1]), textcoords="offset points", xytext=(4, 4))
    k = judged[0].held_back.k if judged and judged[0].held_back else 7
    axis.set(
        xlabel="time",
        ylabel=f"acceptance length, K={k}",
        title="versions on held-back answers: before (line), after (point, 95 % interval)",
    )
    figure.autofmt_xdate()
    save_figure(pyplot, figure, path)
