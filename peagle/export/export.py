"""Complete checkpoints for vLLM: every tensor inside, nothing left to be guessed, proven by reading it back."""

import json
from copy import deepcopy
from pathlib import Path
from shlex import quote
from typing import Any, Literal

import torch

from peagle.drafter.formats import checkpoint, speculators, vllm
from peagle.drafter.formats.llama import names_to_theirs
from peagle.drafter.model import Drafter
from peagle.errors import UserError
from peagle.export.vllm_subset import vllm_subset
from peagle.paths import checkpoint_folder, publish_folder, save_tensors, write_json
from peagle.reference import reference

ExportFormat = Literal["vllm", "speculators"]


def export(
    drafter: Drafter,
    folder: Path,
    to: ExportFormat,
    k: int,
    verifier: dict[str, Any],
    dtype: torch.dtype | None = None,
) -> None:
    """Writes `folder` whole or not at all. `verifier`: the target's {"name_or_path", "architectures"}.

    What vLLM lacks is left out (lacking.py).
    """
    drafter = vllm_subset(drafter)
    config = drafter.config
    if config.aux_layer_ids is None:
        raise UserError(
            "the drafter does not say which layers it taps: load it together with its target"
        )
    dtype = dtype or drafter.fc.weight.dtype
    if to == "vllm":
        raw, first_layer = vllm.config_to_json(config, dtype), vllm.FIRST_LAYER
    else:
        raw, first_layer = (
            speculators.config_to_json(config, k, dtype, verifier),
            speculators.FIRST_LAYER,
        )
    tensors = {name: t.cpu() for name, t in complete_tensors(drafter).items()}
    theirs = {
        name: t.to(dtype if t.is_floating_point() else None, copy=True).contiguous()
        for name, t in names_to_theirs(tensors, config, first_layer).items()
    }
    with publish_folder(checkpoint_folder(folder)) as staging:
        save_tensors(theirs, staging / "model.safetensors")
        write_json(staging / "config.json", raw)
        same, total = same_drafts(
            deepcopy(drafter).to(dtype), checkpoint.load(staging, None), min(k, 8)
        )
        if same != total:
            raise UserError(
                f"the exported drafter drafts differently ({same} of {total} drafts equal): nothing written"
            )


def complete_tensors(drafter: Drafter) -> dict[str, torch.Tensor]:
    """By our names; the shared ones included."""
    tensors = dict(drafter.state_dict())
    tensors |= {"embed_tokens.weight": drafter.embed_tokens, "lm_head.weight": drafter.lm_head}
    return tensors | ({} if drafter.target_ids is None else {"target_ids": drafter.target_ids})


def same_drafts(one: Drafter, other: Drafter, k: int, contexts: int = 8) -> tuple[int, int]:
    """On random contexts: how many of the drafts of two drafters are equal, of how many."""
    config, same = one.config, 0
    generator = torch.Generator().manual_seed(0)
    for i in range(contexts):
        n = 2 + 3 * i
        ids = torch.randint(config.vocab_size, (n + 1,), generator=generator)
        g = torch.randn(n, config.num_taps * config.target_hidden_size, generator=generator)
        drafts = [
            reference.propose(d, g.to(d.fc.weight), ids.to(d.fc.weight.device), k).cpu()
            for d in (one, other)
        ]
        same += int((drafts[0] == drafts[1]).sum())
    return same, contexts * k


def vllm_command(folder: Path, to: ExportFormat, drafter: Drafter, k: int, target: str) -> str:
    """How vLLM serves the export: all four keys, none left to be guessed, and the runner that P-EAGLE needs."""
    parallel = drafter.config.method == "p-eagle"
    runner = "VLLM_USE_V2_MODEL_RUNNER=0 " if parallel else ""
    if to == "speculators":
        return f"{runner}vllm serve {quote(str(folder))}"
    spec = {
        "method": "eagle3",
        "model": str(folder),
        "num_speculative_tokens": k,
        "parallel_drafting": parallel,
    }
    return f"{runner}vllm serve {quote(target)} --speculative-config {quote(json.dumps(spec))}"
