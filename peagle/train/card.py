"""The model card of a trained drafter: its data, its training and its acceptance length."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from peagle.drafter.config import DrafterConfig
from peagle.train.config import TrainConfig

METHOD_NAMES = {"p-eagle": "P-EAGLE", "eagle3": "EAGLE-3"}
LOCAL_KEYS = ("data", "out", "device")  # They have no meaning on another machine.

CardRows = dict[str, str | float | None]  # label -> value of the card's table


def model_card(
    drafter: DrafterConfig,
    config: TrainConfig,
    rows: CardRows,
    evaluations: Sequence[Mapping[str, Any]] = (),
    commands: Sequence[str] = (),
) -> str:
    """The card in Markdown; `evaluations` are the JSON of `peagle evaluate`."""
    plural = "s" if drafter.num_layers > 1 else ""
    kind = f"{METHOD_NAMES[drafter.method]} drafter, {drafter.num_layers} layer{plural}"
    lines = [
        f"# {kind}, for {drafter.target}",
        "",
        f"Target revision `{drafter.target_revision}`. Taps {list(drafter.aux_layer_ids or ())},"
        f" trained for K up to {drafter.k_trained},"
        f" draft vocabulary {drafter.draft_vocab_size:,} of {drafter.vocab_size:,}.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {label} | {format_value(value)} |" for label, value in rows.items()),
        "",
    ]
    for evaluation in evaluations:
        lines += [*evaluation_table(evaluation), ""]
    if commands:
        lines += ["Commands:", "", "```", *commands, "```", ""]
    lines += [
        "Settings that differ from `peagle train --print-config`:",
        "",
        "```yaml",
        *changed_settings(config),
        "```",
        "",
    ]
    lines += ["![loss, matches per depth and acceptance length](curves.png)", ""]
    if drafter.calibration:
        factors = " ".join(f"{factor:.2f}" for factor in drafter.calibration)
        lines += [
            f"Probabilities are those of the logits times these factors, by depth: {factors}.",
            "",
            "![reliability](calibration.png)",
            "",
        ]
    return "\n".join(lines)


def format_value(value: str | float | None) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def evaluation_table(evaluation: Mapping[str, Any]) -> list[str]:
    """For each temperature a table with a row for each set and a column for each K."""
    results = evaluation["results"]
    lines: list[str] = []
    for temperature in dict.fromkeys(result["temperature"] for result in results):
        own = [result for result in results if result["temperature"] == temperature]
        ks = list(dict.fromkeys(result["k"] for result in own))
        mode = "greedy" if not temperature else f"temperature {temperature:g}"
        lines += [
            f"Acceptance length, {mode}, at most {evaluation['max_tokens']} tokens an answer:",
            "",
            "| set | tasks | " + " | ".join(f"K={k}" for k in ks) + " |",
            "|---|---|" + "---|" * len(ks),
        ]
        for name in dict.fromkeys(result["set"] for result in own):
            cells = {result["k"]: result for result in own if result["set"] == name}
            lengths = " | ".join(f"{cells[k]['acceptance_length']:.2f}" for k in ks)
            lines.append(f"| {name} | {cells[ks[0]]['tasks']} | {lengths} |")
        means = {m["k"]: m for m in evaluation["mean"] if m["temperature"] == temperature}
        mean = " | ".join(f"{means[k]['acceptance_length']:.2f}" for k in ks)
        lines += [f"| mean | | {mean} |", ""]
        lines += [position_line(result) for result in own if result["k"] == max(ks)]
        lines.append("")
    return lines


def position_line(result: Mapping[str, Any]) -> str:
    shares = " ".join(f"{share:.2f}" for share in result["accepted_per_position"])
    return f"Accepted by position, {result['set']}, K={result['k']}: {shares}.  "


def changed_settings(config: TrainConfig) -> list[str]:
    """The keys whose value is not the default, without those of the local machine."""
    values = asdict(config)
    defaults = asdict(TrainConfig())
    names = [f.name for f in fields(config) if f.name not in LOCAL_KEYS]
    return [
        f"{name}: {values[name]!r}".replace("(", "[").replace(")", "]")
        for name in names
        if values[name] != defaults[name]
    ]
