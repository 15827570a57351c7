"""A picture of a run: loss, matches per depth, acceptance length on held-out answers."""

from pathlib import Path
from typing import Any


def draw(entries: list[dict[str, Any]], path: Path, title: str = "") -> None:
    """Written beside and renamed. Without matplotlib there is no picture; the log holds everything."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    logs = [entry for entry in entries if "loss" in entry]
    evaluations = [entry for entry in entries if "acceptance_length" in entry]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    steps = [entry["step"] for entry in logs]
    left.plot(steps, [entry["loss"] for entry in logs], color="black", linewidth=1)
    left.set(xlabel="step", ylabel="loss per row", yscale="log", title="loss")
    colours = plt.get_cmap("viridis")
    depths = len(logs[-1]["match"]) if logs else 0
    for depth in range(depths):
        shares = [entry["match"][depth] for entry in logs]
        middle.plot(steps, shares, color=colours(depth / max(depths, 1)), linewidth=1, label=f"depth {depth}")
    middle.set(xlabel="step", ylabel="share of rows", ylim=(0, 1), title="best token = the target's, per depth")
    if depths:
        middle.legend(fontsize=7, ncols=2)
    right.plot([e["step"] for e in evaluations], [e["acceptance_length"] for e in evaluations], "o-", color="black")
    k = evaluations[-1]["k"] if evaluations else "?"
    right.set(xlabel="step", ylabel="tokens per target pass", title=f"acceptance length, K={k}, held-out")
    if title:
        figure.suptitle(title)
    partial = path.with_name(f".{path.name}.png")
    figure.savefig(partial, dpi=100)
    plt.close(figure)
    partial.replace(path)
