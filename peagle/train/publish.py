"""From a finished run to a folder one can ship: calibrated, int8 where that costs nothing, with its card and curves."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from peagle.drafter import Drafter
from peagle.drafter.formats import checkpoint, compact
from peagle.paths import publish_folder
from peagle.train.card import card
from peagle.train.curves import draw_reliability
from peagle.train.evaluation.acceptance import length_of
from peagle.train.evaluation.calibration import Reliability, calibrated
from peagle.train.features.features import online
from peagle.train.objective.passes import Passes
from peagle.train.run import TrainRun

COST = 0.01  # int8 may cost this share of the acceptance length


def publish(run: TrainRun, commands: list[str]) -> tuple[Path, float | None]:
    """OUT/published, and the acceptance length of what lies in it, on the held-out answers (None: there are none)."""
    trainer, target = run.trainer, run.target
    source, folder = trainer.out / "drafter", trainer.out / "published"
    whole = checkpoint.load(source, target, torch.float32)
    passes = passes_of(run, whole)
    before, reliability = held_out_length(run, passes), calibrate(run, passes)
    with publish_folder(folder) as staging:
        compact.save(whole, staging, target, torch.bfloat16, int8=True)
        after = held_out_length(
            run, passes_of(run, checkpoint.load(staging, target, torch.float32))
        )
        cheap = before is not None and after is not None and after >= (1 - COST) * before
        if not cheap:
            compact.save(whole, staging, target, torch.bfloat16)
        length = after if cheap else before
        told = (
            measured(run)
            | stored_as(cheap, before, after)
            | {f"acceptance length, K={run.config.eval_k}": length}
        )
        if reliability is not None:
            told |= reliability.told()
            draw_reliability(reliability, staging / "calibration.png")
        (staging / "README.md").write_text(card(whole.config, run.config, told, commands=commands))
        if (trainer.out / "curves.png").is_file():
            shutil.copy(trainer.out / "curves.png", staging)
    return folder, length


def stored_as(cheap: bool, before: float | None, after: float | None) -> dict[str, str]:
    if before is None or after is None:
        return {"stored as": "bfloat16", "held-out answers": "none: nothing was measured"}
    return {
        "stored as": f"{'int8 rows' if cheap else 'bfloat16'} (held-out: bfloat16 {before:.3f}, int8 {after:.3f})"
    }


def held_out_length(run: TrainRun, passes: Passes) -> float | None:
    if not len(run.material.held_out):
        return None
    return length_of(run.trainer.held_out_steps(passes))


def calibrate(run: TrainRun, passes: Passes) -> Reliability | None:
    """Puts the factors into the drafter's config; None: nothing was held out, or it is no parallel drafter."""
    trainer, held_out, drafter = run.trainer, run.material.held_out, passes.drafter
    if not len(held_out) or drafter.config.method != "p-eagle":
        return None
    features, tokens = online(trainer.features), run.config.pack_tokens
    factors, found = calibrated(passes, features, held_out, run.config.k, tokens, trainer.flex)
    drafter.config = replace(drafter.config, calibration=factors)
    return found


def passes_of(run: TrainRun, drafter: Drafter) -> Passes:
    passes = Passes(drafter, run.trainer.passes.dtype)
    if run.trainer.flex:
        passes.compile()
    return passes


def measured(run: TrainRun) -> dict[str, Any]:
    """What the card tells of the run."""
    documents, trainer = run.material.documents, run.trainer
    return {
        "documents": len(documents),
        "answer tokens": documents.answer_tokens,
        "draft vocabulary covers": f"{run.material.coverage:.2%} of them",
        "steps": trainer.step,
        "tokens the target has seen": trainer.tokens,
        "minutes of training": trainer.seconds / 60,
        "device": device_name(trainer.target.device),
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
