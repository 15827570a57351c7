"""Figures of a run: loss, matches per depth and acceptance length; reliability of probabilities.

Files are written atomically. Without matplotlib there are no figures; the log and the card hold all
numbers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peagle.train.evaluation.calibration import Reliability, reliability_bins
from peagle.train.records import EvaluationRecord, Record, StepRecord

DEPTH_GROUPS = ((0, 0), (1, 2), (3, 5), (6, 63))  # (first, last) depth of each curve


def import_pyplot() -> Any:
    """matplotlib.pyplot without a display; None if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_curves(records: Sequence[Record], path: Path) -> None:
    pyplot = import_pyplot()
    if pyplot is None:
        return
    steps = [record for record in records if isinstance(record, StepRecord)]
    evaluations = [record for record in records if isinstance(record, EvaluationRecord)]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    x = [record.step for record in steps]
    left.plot(x, [record.loss for record in steps], color="black", linewidth=1)
    left.set(xlabel="step", ylabel="loss per row", yscale="log", title="loss")
    _draw_matches(middle, steps, pyplot.get_cmap("viridis"))
    _draw_acceptance(right, evaluations)
    save_figure(pyplot, figure, path)


def _draw_matches(axis: Any, steps: list[StepRecord], colors: Any) -> None:
    depths = len(steps[-1].match) if steps else 0
    x = [record.step for record in steps]
    for depth in range(depths):
        shares = [record.match[depth] for record in steps]
        color = colors(depth / max(depths, 1))
        axis.plot(x, shares, color=color, linewidth=1, label=f"depth {depth}")
    axis.set(
        xlabel="step",
        ylabel="fraction of rows",
        ylim=(0, 1),
        title="best token = the target's, per depth",
    )
    if depths:
        axis.legend(fontsize=7, ncols=2)


def _draw_acceptance(axis: Any, evaluations: list[EvaluationRecord]) -> None:
    x = [record.step for record in evaluations]
    axis.plot(x, [record.acceptance_length for record in evaluations], "o-", color="black")
    k = evaluations[-1].k if evaluations else "?"
    axis.set(
        xlabel="step", ylabel="tokens per target pass", title=f"acceptance length, K={k}, held-out"
    )


def draw_reliability(reliability: Reliability, path: Path) -> None:
    """Draw the predicted probability of the best draft against the fraction that was right."""
    pyplot = import_pyplot()
    if pyplot is None:
        return
    kinds = {
        "probability, plain": reliability.plain,
        "probability, calibrated": reliability.scaled,
    }
    if reliability.confidence is not None:
        kinds["confidence output"] = reliability.confidence
    size = (5 * len(kinds), 4.6)
    figure, axes = pyplot.subplots(1, len(kinds), figsize=size, layout="constrained")
    for axis, (title, predicted) in zip(axes, kinds.items(), strict=True):
        _draw_reliability_axis(axis, reliability, predicted, pyplot.get_cmap("viridis"))
        axis.set(xlabel="predicted", ylabel="fraction right", xlim=(0, 1), ylim=(0, 1), title=title)
        axis.legend(fontsize=8)
    save_figure(pyplot, figure, path)


def _draw_reliability_axis(
    axis: Any, reliability: Reliability, predicted: Any, colors: Any
) -> None:
    """One curve for each group of depths."""
    axis.plot([0, 1], [0, 1], color="gray", linewidth=1, linestyle="dotted")
    for number, (low, high) in enumerate(DEPTH_GROUPS):
        rows = (reliability.depth >= low) & (reliability.depth <= high)
        if not rows.any():
            continue
        bins = reliability_bins(predicted[rows], reliability.right[rows])
        last = min(high, reliability.depth.max())
        axis.plot(
            [part.predicted for part in bins],
            [part.right for part in bins],
            "o-",
            markersize=3,
            color=colors(number / len(DEPTH_GROUPS)),
            label=f"depth {low}" if low == high else f"depths {low} to {last}",
        )


def save_figure(pyplot: Any, figure: Any, path: Path) -> None:
    partial = path.with_name(f".{path.name}.png")
    figure.savefig(partial, dpi=100)
    pyplot.close(figure)
    partial.replace(path)
