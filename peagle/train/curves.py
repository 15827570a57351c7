"""Pictures of a run: loss, matches per depth, acceptance length on held-out answers; how far probabilities are true.

They are written beside and renamed. Without matplotlib there is none; the log and the card hold everything.
"""

from pathlib import Path
from typing import Any

from peagle.train.evaluation.calibration import Reliability, binned

DEPTHS = ((0, 0), (1, 2), (3, 5), (6, 63))  # drawn together


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def draw(entries: list[dict[str, Any]], path: Path, title: str = "") -> None:
    if (plt := pyplot()) is None:
        return
    logs = [entry for entry in entries if "loss" in entry]
    evaluations = [entry for entry in entries if "acceptance_length" in entry]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    steps = [entry["step"] for entry in logs]
    left.plot(steps, [entry["loss"] for entry in logs], color="black", linewidth=1)
    left.set(xlabel="step", ylabel="loss per row", yscale="log", title="loss")
    colors = plt.get_cmap("viridis")
    depths = len(logs[-1]["match"]) if logs else 0
    for depth in range(depths):
        shares = [entry["match"][depth] for entry in logs]
        middle.plot(
            steps, shares, color=colors(depth / max(depths, 1)), linewidth=1, label=f"depth {depth}"
        )
    middle.set(
        xlabel="step",
        ylabel="share of rows",
        ylim=(0, 1),
        title="best token = the target's, per depth",
    )
    if depths:
        middle.legend(fontsize=7, ncols=2)
    right.plot(
        [e["step"] for e in evaluations],
        [e["acceptance_length"] for e in evaluations],
        "o-",
        color="black",
    )
    k = evaluations[-1]["k"] if evaluations else "?"
    right.set(
        xlabel="step", ylabel="tokens per target pass", title=f"acceptance length, K={k}, held-out"
    )
    if title:
        figure.suptitle(title)
    save(plt, figure, path)


def draw_reliability(reliability: Reliability, path: Path) -> None:
    """What was said of the best draft against the share that was right, per group of depths."""
    if (plt := pyplot()) is None:
        return
    kinds = {"probability, plain": reliability.plain, "probability, calibrated": reliability.scaled}
    if reliability.confidence is not None:
        kinds["confidence output"] = reliability.confidence
    figure, axes = plt.subplots(1, len(kinds), figsize=(5 * len(kinds), 4.6), layout="constrained")
    colors = plt.get_cmap("viridis")
    for axis, (title, said) in zip(axes, kinds.items(), strict=True):
        axis.plot([0, 1], [0, 1], color="gray", linewidth=1, linestyle="dotted")
        for number, (low, high) in enumerate(DEPTHS):
            own = (reliability.depth >= low) & (reliability.depth <= high)
            if own.any():
                means, shares, _ = zip(*binned(said[own], reliability.right[own]), strict=True)
                name = (
                    f"depth {low}"
                    if low == high
                    else f"depths {low} to {min(high, reliability.depth.max())}"
                )
                axis.plot(
                    means,
                    shares,
                    "o-",
                    markersize=3,
                    color=colors(number / len(DEPTHS)),
                    label=name,
                )
        axis.set(
            xlabel="said", ylabel="share that was right", xlim=(0, 1), ylim=(0, 1), title=title
        )
        axis.legend(fontsize=8)
    save(plt, figure, path)


def save(plt: Any, figure: Any, path: Path) -> None:
    partial = path.with_name(f".{path.name}.png")
    figure.savefig(partial, dpi=100)
    plt.close(figure)
    partial.replace(path)
