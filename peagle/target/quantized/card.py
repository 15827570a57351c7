"""The card of a quantized target: what it was made of, how, and how far it is off."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.target.quantized.codes import CLIPS
from peagle.target.quantized.formats import WEIGHT_FORMATS

if TYPE_CHECKING:
    from peagle.target.quantized.write import Written

TITLE = "# Quantized target"
WORDS = {
    "fp8": "Weights in fp8 (e4m3) with a scale per output; a server may round inputs to fp8, with a scale per token.",
    "int8": "Weights in int8 with a scale per output; a server may round inputs to int8, with a scale per token.",
    "int4": "Weights in int4 with a scale for {group} inputs of an output; inputs as they are.",
}


def card(source: Path, config: dict[str, Any], written: "Written") -> str:
    made_of = config.get("_name_or_path") or config.get("_model_name_or_path") or source.name
    how = WORDS[written.format].format(group=written.group)
    told, cut = written.as_dict(), ""
    if WEIGHT_FORMATS[written.format].searched:
        cut = (
            f" The largest magnitude that is kept is the one of {len(CLIPS)}, from {CLIPS[-1]:g} to {CLIPS[0]:g} of it,"
            " with the least squared error."
        )
    return "\n".join(
        [
            f"{TITLE}: {made_of}, {written.format}",
            "",
            f"{how} Rounded to the nearest.{cut} No data was used. Embeddings, lm_head, norms and biases are as they"
            " were.",
            "",
            "| | |",
            "|---|---|",
            f"| layout | compressed-tensors, {WEIGHT_FORMATS[written.format].layout} |",
            f"| matrices | {told['matrices']} |",
            f"| bytes | {told['bytes_before']:,} -> {told['bytes_after']:,} |",
            f"| error, as a share of the weights' length | {written.error:.3%} |",
            f"| the worst matrix | {told['worst']}, {told['worst_error']:.3%} |",
            "",
            "`peagle generate PAIR PROMPT --target DIR` runs it with the pair's drafter, `vllm serve DIR` serves it.",
            "",
        ]
    )
