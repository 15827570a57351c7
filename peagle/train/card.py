"""The card of a trained drafter: what it learned from, for how long, and what it is worth."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from peagle.drafter.config import DrafterConfig
from peagle.train.config import TrainConfig

NAMES = {"p-eagle": "P-EAGLE", "eagle3": "EAGLE-3"}


def card(
    drafter: DrafterConfig,
    config: TrainConfig,
    measured: dict[str, Any],
    evaluations: Sequence[dict[str, Any]] = (),
    commands: Sequence[str] = (),
) -> str:
    """Markdown. `measured`: label -> figure; `evaluations`: from Evaluation.as_dict; `commands`: as they were run."""
    kind = f"{NAMES[drafter.method]} drafter, {drafter.num_layers} layer{'s' * (drafter.num_layers > 1)}"
    lines = [
        f"# {kind}, for {drafter.target}",
        "",
        f"Target revision `{drafter.target_revision}`. Taps {list(drafter.aux_layer_ids or ())}, trained for"
        f" K up to {drafter.k_trained}, draft vocabulary {drafter.draft_vocab_size:,} of {drafter.vocab_size:,}.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {label} | {figure(value)} |" for label, value in measured.items()),
        "",
    ]
    for evaluation in evaluations:
        lines += [*table(evaluation), ""]
    if commands:
        lines += ["Commands:", "", "```", *commands, "```", ""]
    lines += [
        "Settings that differ from `peagle train --print-config`:",
        "",
        "```yaml",
        *differing(config),
        "```",
        "",
    ]
    lines += ["![loss, matches per depth and acceptance length](curves.png)", ""]
    if drafter.calibration:
        factors = " ".join(f"{factor:.2f}" for factor in drafter.calibration)
        lines += [
            f"Probabilities are of logits times, by depth: {factors}.",
            "",
            "![reliability](calibration.png)",
            "",
        ]
    return "\n".join(lines)


def figure(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def table(evaluation: dict[str, Any]) -> list[str]:
    """A row a set, a column a K, for each temperature."""
    lines: list[str] = []
    for temperature in dict.fromkeys(result["temperature"] for result in evaluation["results"]):
        own = [result for result in evaluation["results"] if result["temperature"] == temperature]
        ks = list(dict.fromkeys(result["k"] for result in own))
        how = "greedy" if not temperature else f"temperature {temperature:g}"
        lines += [
            f"Acceptance length, {how}, at most {evaluation['max_tokens']} tokens an answer:",
            "",
        ]
        lines += [
            "| set | tasks | " + " | ".join(f"K={k}" for k in ks) + " |",
            "|---|---|" + "---|" * len(ks),
        ]
        for name in dict.fromkeys(result["set"] for result in own):
            cells = {r["k"]: r for r in own if r["set"] == name}
            shown = " | ".join(f"{cells[k]['acceptance_length']:.2f}" for k in ks)
            lines.append(f"| {name} | {cells[ks[0]]['tasks']} | {shown} |")
        means = {m["k"]: m for m in evaluation["mean"] if m["temperature"] == temperature}
        mean = " | ".join(f"{means[k]['acceptance_length']:.2f}" for k in ks)
        lines += [f"| mean | | {mean} |", ""]
        for result in own:
            if result["k"] == max(ks):
                shares = " ".join(f"{share:.2f}" for share in result["accepted_per_position"])
                lines.append(f"Accepted by position, {result['set']}, K={result['k']}: {shares}.  ")
        lines.append("")
    return lines


def differing(config: TrainConfig) -> list[str]:
    """Keys whose value is not the default; folders are not told, they mean nothing elsewhere."""
    default = TrainConfig()
    skip = ("data", "out", "device")
    names = [f.name for f in fields(config) if f.name not in skip]
    own, usual = asdict(config), asdict(default)
    return [
        f"{name}: {own[name]!r}".replace("(", "[").replace(")", "]")
        for name in names
        if own[name] != usual[name]
    ]
