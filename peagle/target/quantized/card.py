"""The README of a quantized target: its source, its format, and the error of its weights."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.target.quantized.codes import CLIP_FRACTIONS
from peagle.target.quantized.formats import WEIGHT_FORMATS

if TYPE_CHECKING:
    from peagle.target.quantized.write import QuantizationReport

TITLE = "# Quantized target"
DESCRIPTIONS = {
    "fp8": "Weights in fp8 (e4m3) with one scale per output; a server may round inputs to fp8,"
    " with one scale per token.",
    "int8": "Weights in int8 with one scale per output; a server may round inputs to int8,"
    " with one scale per token.",
    "int4": "Weights in int4 with one scale per {group} inputs of an output; inputs are not"
    " rounded.",
}


def card(source: Path, config: dict[str, Any], report: "QuantizationReport") -> str:
    format = WEIGHT_FORMATS[report.format]
    description = DESCRIPTIONS[report.format].format(group=report.group)
    search = ""
    if format.searches_clip:
        search = (
            f" The clipping point is the one of {len(CLIP_FRACTIONS)} candidates, from"
            f" {CLIP_FRACTIONS[-1]:g} to {CLIP_FRACTIONS[0]:g} of the largest magnitude, with the"
            " least squared error."
        )
    matrices, routers = f"{len(report.errors)}", ""
    if report.expert_matrices:
        matrices += f", {report.expert_matrices} of them of experts"
        routers = "routers, "
    text = (
        f"{description} Rounded to the nearest.{search} No data was used. Embeddings, lm_head,"
        f" {routers}norms and biases are unchanged."
    )
    layout = f"compressed-tensors, {format.layout}"
    return card_text(source, config, report, text, layout, matrices)


def card_text(
    source: Path,
    config: dict[str, Any],
    report: "QuantizationReport",
    description: str,
    layout: str,
    matrices: str,
) -> str:
    """The card of a target in any format."""
    source_name = config.get("_name_or_path") or config.get("_model_name_or_path") or source.name
    values = report.as_dict()
    return "\n".join(
        [
            f"{TITLE}: {source_name}, {report.format}",
            "",
            description,
            "",
            "| | |",
            "|---|---|",
            f"| layout | {layout} |",
            f"| matrices | {matrices} |",
            f"| bytes | {values['bytes_before']:,} -> {values['bytes_after']:,} |",
            f"| error, relative to the norm of the weights | {report.error:.3%} |",
            f"| the worst matrix | {values['worst']}, {values['worst_error']:.3%} |",
            "",
            "`peagle generate PAIR PROMPT --target DIR` runs it with the drafter of the pair,"
            " `vllm serve DIR` serves it.",
            "",
        ]
    )
