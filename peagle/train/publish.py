"""From a finished run to a folder that can be shipped.

The drafter is calibrated and stored in 8 or 4 bits where that costs little; the folder has a model
card and the curves.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from peagle.drafter import Drafter
from peagle.drafter.formats import checkpoint, compact
from peagle.drafter.formats.row_format import INT4, INT8, RowFormat
from peagle.paths import publish_folder
from peagle.train.card import CardRows, model_card
from peagle.train.curves import draw_reliability
from peagle.train.evaluation.calibration import Reliability, calibrate
from peagle.train.evaluation.replay import acceptance_length
from peagle.train.objective.passes import DrafterPasses
from peagle.train.run import TrainRun

MAX_ROUNDING_LOSS = 0.01  # fraction of the acceptance length that 4 or 8 bits may cost


class Published(NamedTuple):
    folder: Path
    acceptance_length: float | None  # on held-out answers; None if there are none


def publish(
    run: TrainRun, commands: list[str], max_rounding_loss: float = MAX_ROUNDING_LOSS
) -> Published:
    """Write OUT/published; `commands` are the commands of the run, for its card."""
    trainer = run.trainer
    drafter = checkpoint.load(trainer.out / "drafter", run.target, torch.float32)
    length = held_out_length(run, new_passes(run, drafter))
    reliability = None
    folder = trainer.out / "published"
    with publish_folder(folder) as staging:
        rows = run_rows(run)
        if length is None:
            compact.save(drafter, staging, run.target, torch.bfloat16)
            rows |= {"stored as": "bfloat16", "held-out answers": "none: nothing was measured"}
        else:
            length, row_format, rows["stored as"] = save_rounded(
                run, drafter, staging, length, max_rounding_loss
            )
            # The factors are those of the stored weights.
            stored = checkpoint.load(staging, run.target, torch.float32)
            reliability = calibrate_drafter(run, new_passes(run, stored))
            drafter.config = replace(drafter.config, calibration=stored.config.calibration)
            compact.save(drafter, staging, run.target, torch.bfloat16, row_format)
        rows |= {f"acceptance length, K={run.config.logged_k}": length}
        if reliability is not None:
            rows |= reliability.card_rows()
            draw_reliability(reliability, staging / "calibration.png")
        card = model_card(drafter.config, run.config, rows, commands=commands)
        (staging / "README.md").write_text(card)
        if (trainer.out / "curves.png").is_file():
            shutil.copy(trainer.out / "curves.png", staging)
    return Published(folder, length)


def save_rounded(
    run: TrainRun, drafter: Drafter, folder: Path, length: float, max_loss: float
) -> tuple[float, RowFormat | None, str]:
    """Store the drafter in the fewest bits, from `bits` on, that cost at most `max_loss`.

    Returns the acceptance length of what is stored, its format (None: bfloat16), and a description
    for the card.
    """
    measured = f"held-out: bfloat16 {length:.3f}"
    for rows in (INT4, INT8) if run.config.bits == 4 else (INT8,):
        compact.save(drafter, folder, run.target, torch.bfloat16, rows)
        stored = checkpoint.load(folder, run.target, torch.float32)
        rounded_length = held_out_length(run, new_passes(run, stored))
        assert rounded_length is not None
        measured += f", {rows.weights} {rounded_length:.3f}"
        if rounded_length >= (1 - max_loss) * length:
            return rounded_length, rows, f"{rows.weights} rows ({measured})"
    compact.save(drafter, folder, run.target, torch.bfloat16)
    return length, None, f"bfloat16 ({measured})"


def held_out_length(run: TrainRun, passes: DrafterPasses) -> float | None:
    """The acceptance length on held-out answers; None if there are none."""
    if not len(run.data.held_out):
        return None
    return acceptance_length(run.trainer.held_out_steps(passes))


def calibrate_drafter(run: TrainRun, passes: DrafterPasses) -> Reliability | None:
    """Put the calibration factors into the drafter's config.

    None: no answers were held out, or the drafter is not parallel.
    """
    held_out = run.data.held_out
    drafter = passes.drafter
    if not len(held_out) or drafter.config.method != "p-eagle":
        return None
    calibration = calibrate(run.trainer.replay(passes), held_out, run.config.k)
    drafter.config = replace(drafter.config, calibration=calibration.factors)
    return calibration.reliability


def new_passes(run: TrainRun, drafter: Drafter) -> DrafterPasses:
    """Not compiled: that takes longer than what is measured here."""
    return DrafterPasses(drafter, run.trainer.passes.dtype)


def run_rows(run: TrainRun) -> CardRows:
    """The rows of the card about the run."""
    documents = run.data.documents
    trainer = run.trainer
    return {
        "documents": len(documents),
        "answer tokens": documents.answer_tokens,
        "draft vocabulary covers": f"{run.data.coverage:.2%} of them",
        "steps": trainer.step,
        "tokens the target has seen": trainer.tokens,
        "minutes of training": trainer.seconds / 60,
        "device": device_name(trainer.target.device),
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
