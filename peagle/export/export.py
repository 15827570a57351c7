"""Complete checkpoints for vLLM: no tensor or key is missing, verified by reading them back."""

import json
from copy import deepcopy
from pathlib import Path
from shlex import quote
from typing import Literal

import torch

from peagle.drafter.formats import checkpoint, speculators, vllm
from peagle.drafter.formats.llama import names_to_theirs
from peagle.drafter.formats.speculators import VerifierConfig
from peagle.drafter.model import Drafter
from peagle.errors import UserError
from peagle.export.vllm_subset import complete_tensors, vllm_subset
from peagle.paths import checkpoint_folder, publish_folder, save_tensors, write_json
from peagle.reference import reference

ExportFormat = Literal["vllm", "speculators"]
MAX_VERIFIED_K = 8


def export(
    drafter: Drafter,
    folder: Path,
    to: ExportFormat,
    k: int,
    verifier: VerifierConfig | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write `folder` atomically: it appears complete or not at all.

    Parts that vLLM does not support are left out (vllm_subset.py). Only the speculators format
    stores `k` and `verifier`, the name of the target.
    """
    drafter = vllm_subset(drafter)
    config = drafter.config
    if config.aux_layer_ids is None:
        raise UserError("the drafter has no `aux_layer_ids`: load it together with its target")
    dtype = dtype or drafter.fc.weight.dtype
    if to == "vllm":
        config_json = vllm.config_to_json(config, dtype)
        first_layer = vllm.FIRST_LAYER
    elif verifier is None:
        raise UserError("a speculators checkpoint names its target: give `verifier`")
    else:
        config_json = speculators.config_to_json(config, k, dtype, verifier)
        first_layer = speculators.FIRST_LAYER
    tensors = {name: t.cpu() for name, t in complete_tensors(drafter).items()}
    theirs = {
        name: t.to(dtype if t.is_floating_point() else None, copy=True).contiguous()
        for name, t in names_to_theirs(tensors, config, first_layer).items()
    }
    with publish_folder(checkpoint_folder(folder)) as staging:
        save_tensors(theirs, staging / "model.safetensors")
        write_json(staging / "config.json", config_json)
        reloaded = checkpoint.load(staging, None)
        equal, total = same_drafts(deepcopy(drafter).to(dtype), reloaded, min(k, MAX_VERIFIED_K))
        if equal != total:
            raise UserError(
                f"the exported drafter drafts differently ({equal} of {total} drafts are equal):"
                " nothing was written"
            )


def same_drafts(drafter: Drafter, other: Drafter, k: int, contexts: int = 8) -> tuple[int, int]:
    """Draft with both on random contexts; return how many drafts are equal, and of how many."""
    config = drafter.config
    equal = 0
    generator = torch.Generator().manual_seed(0)
    lengths = [2 + 3 * i for i in range(contexts)]
    if config.sliding_window is not None:
        lengths.append(2 * config.sliding_window)
    for n in lengths:
        ids = torch.randint(config.vocab_size, (n + 1,), generator=generator)
        g = torch.randn(n, config.num_taps * config.target_hidden_size, generator=generator)
        drafts = [
            reference.propose(d, g.to(d.fc.weight), ids.to(d.fc.weight.device), k).cpu()
            for d in (drafter, other)
        ]
        equal += int((drafts[0] == drafts[1]).sum())
    return equal, len(lengths) * k


def vllm_command(folder: Path, to: ExportFormat, drafter: Drafter, k: int, target: str) -> str:
    """The shell command with which vLLM serves the export.

    It gives all four keys, because vLLM guesses missing ones, and selects the runner that supports
    P-EAGLE.
    """
    parallel = drafter.config.method == "p-eagle"
    runner = "VLLM_USE_V2_MODEL_RUNNER=0 " if parallel else ""
    if to == "speculators":
        return f"{runner}vllm serve {quote(str(folder))}"
    speculative_config = {
        "method": "eagle3",
        "model": str(folder),
        "num_speculative_tokens": k,
        "parallel_drafting": parallel,
    }
    option = quote(json.dumps(speculative_config))
    return f"{runner}vllm serve {quote(target)} --speculative-config {option}"
