"""From a finished run to a folder one can ship: int8 where that costs nothing, with its card and curves."""

import shutil
from pathlib import Path
from typing import Any

import torch

from peagle.drafter import Drafter, checkpoint, compact
from peagle.home import publish_folder
from peagle.train.acceptance import length_of
from peagle.train.card import card
from peagle.train.passes import Passes
from peagle.train.run import Run

COST = 0.01  # int8 may cost this share of the acceptance length


def publish(run: Run, commands: list[str]) -> tuple[Path, float | None]:
    """OUT/published, and the acceptance length of what lies in it, on the held-out answers (None: there are none)."""
    trainer, target = run.trainer, run.target
    source, folder = trainer.out / "drafter", trainer.out / "published"
    whole = checkpoint.load(source, target, torch.float32)
    before = held_out_length(run, whole)
    with publish_folder(folder) as staging:
        compact.save(whole, staging, target, torch.bfloat16, int8=True)
        after = held_out_length(run, checkpoint.load(staging, target, torch.float32))
        cheap = before is not None and after is not None and after >= (1 - COST) * before
        if not cheap:
            shutil.copytree(source, staging, dirs_exist_ok=True)
        length = after if cheap else before
        told = measured(run) | stored_as(cheap, before, after) | {f"acceptance length, K={run.config.eval_k}": length}
        (staging / "README.md").write_text(card(whole.config, run.config, told, commands=commands))
        if (trainer.out / "curves.png").is_file():
            shutil.copy(trainer.out / "curves.png", staging)
    return folder, length


def stored_as(cheap: bool, before: float | None, after: float | None) -> dict[str, str]:
    if before is None or after is None:
        return {"stored as": "bfloat16", "held-out answers": "none: nothing was measured"}
    return {"stored as": f"{'int8 rows' if cheap else 'bfloat16'} (held-out: bfloat16 {before:.3f}, int8 {after:.3f})"}


def held_out_length(run: Run, drafter: Drafter) -> float | None:
    if not len(run.material.held_out):
        return None
    passes = Passes(drafter, run.trainer.passes.dtype)
    if run.trainer.flex:
        passes.compile()
    return length_of(run.trainer.held_out_steps(passes))


def measured(run: Run) -> dict[str, Any]:
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
