"""`peagle check`: find the errors of a drafter folder before a server fails or drafts badly."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peagle.drafter.config import DrafterConfig
from peagle.drafter.formats import vllm
from peagle.drafter.formats.checkpoint import Checkpoint, load, read
from peagle.drafter.formats.speculators import VerifierConfig
from peagle.drafter.model import Drafter
from peagle.errors import UserError
from peagle.export.export import ExportFormat, export, same_drafts
from peagle.export.vllm_subset import subset_notice, vllm_subset
from peagle.target import Target

Level = Literal["ok", "warning", "error"]
EXPORT_FORMATS: tuple[ExportFormat, ...] = ("vllm", "speculators")
MASK_KEYS_BEFORE_0_28 = {"pard_token", "ptd_token_id"}  # vLLM 0.16 to 0.27 read only these
SHORT_CONTEXT = 2048  # a frequent default, rarely the context of a target


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    text: str


def check(folder: Path, target: Target | None = None, k: int = 7) -> list[Finding]:
    """Return all findings, errors included. Only a folder that cannot be read raises."""
    checkpoint = read(folder)
    config = checkpoint.config
    findings = [
        Finding("ok", f"{checkpoint.format} format, {config.method}, {config.num_layers} layers"),
        *[Finding("error", line) for line in checkpoint.problems()],
        *_check_d2t(checkpoint),
        *_check_aux_layer_ids(checkpoint),
        *_check_mask_id(checkpoint, target),
        *_check_context(config, target),
        *_check_window(checkpoint),
        *_check_training(config, target),
        *_check_fit(config, target),
    ]
    if any(finding.level == "error" for finding in findings):
        return findings
    return findings + _check_exports(checkpoint, target, k)


def _check_d2t(checkpoint: Checkpoint) -> list[Finding]:
    if checkpoint.format == "peagle" or checkpoint.config.pruned or "d2t" not in checkpoint.stored:
        return []
    text = "d2t with a full vocabulary: vLLM 0.32.0 fails to load it. `peagle export` removes it"
    return [Finding("warning", text)]


def _check_aux_layer_ids(checkpoint: Checkpoint) -> list[Finding]:
    ids = checkpoint.config.aux_layer_ids
    if ids is not None:
        return [Finding("ok", f"aux layer ids {list(ids)}")]
    parent = "eagle_config." if checkpoint.format == "vllm" else ""
    text = (
        "no aux layer ids: vLLM silently assumes (2, L//2, L-3)."
        f" Write them as {parent}eagle_aux_hidden_state_layer_ids"
    )
    return [Finding("warning" if checkpoint.config.num_taps == 3 else "error", text)]


def _check_mask_id(checkpoint: Checkpoint, target: Target | None) -> list[Finding]:
    config = checkpoint.config
    if config.method != "p-eagle":
        return []
    findings = []
    ids = {
        key: checkpoint.raw[key] for key in vllm.MASK_KEYS if checkpoint.raw.get(key) is not None
    }
    if len(set(map(int, ids.values()))) > 1:
        text = f"the mask id has different values: {ids}. Give all keys the same value"
        findings.append(Finding("error", text))
    if checkpoint.format == "vllm" and not ids.keys() >= MASK_KEYS_BEFORE_0_28:
        text = (
            f"the mask id is only given as {', '.join(ids)}:"
            " vLLM 0.16 to 0.27 read pard_token or ptd_token_id"
        )
        findings.append(Finding("warning" if ids.keys() & MASK_KEYS_BEFORE_0_28 else "error", text))
    if target is not None and (usage := used_token(target, config.mask_token_id or 0)):
        text = f"mask id {config.mask_token_id} is {usage}: choose an unused vocabulary row"
        findings.append(Finding("error", text))
    return findings or [Finding("ok", f"mask id {config.mask_token_id}")]


def used_token(target: Target, token_id: int) -> str | None:
    """What the target uses this id for, or None for a row that never occurs in text."""
    if token_id in target.stop_ids:
        return "a stop token of the target"
    tokenizer = target.tokenizer
    if tokenizer is None:
        return None
    text = tokenizer.convert_ids_to_tokens(token_id)
    if text is None or text == f"[PAD{token_id}]":  # GGUF files name rows without a token so.
        return None
    special = token_id in tokenizer.all_special_ids or token_id in tokenizer.added_tokens_decoder
    if not special:
        return f"the ordinary token {text!r}"
    template = tokenizer.chat_template or ""
    return f"{text!r}, which the chat template writes" if text in template else None


def _check_context(config: DrafterConfig, target: Target | None) -> list[Finding]:
    context = config.max_position_embeddings
    if target is not None and context < target.context:
        text = (
            f"max_position_embeddings is {context}, the target's {target.context}:"
            " acceptance breaks down beyond it. Copy the target's value"
        )
        return [Finding("error", text)]
    if target is None and context <= SHORT_CONTEXT:
        text = f"max_position_embeddings is only {context}: compare it with the target's"
        return [Finding("warning", text)]
    return [Finding("ok", f"context {context}")]


def _check_window(checkpoint: Checkpoint) -> list[Finding]:
    if (window := checkpoint.config.sliding_window) is not None:
        return [Finding("ok", f"sliding window {window}")]
    raw = checkpoint.raw
    layer = raw.get("transformer_layer_config") or raw
    if layer.get("sliding_window") is None:
        return []
    text = (
        f"sliding_window {layer['sliding_window']} has no effect, as in vLLM: layer_types names no"
        " sliding_attention layer. Add it, or remove the window"
    )
    return [Finding("warning", text)]


def _check_training(config: DrafterConfig, target: Target | None) -> list[Finding]:
    findings = []
    if target is not None and config.target_revision not in (None, target.revision):
        text = (
            f"the drafter was trained on revision {config.target_revision} of the target, not on"
            f" {target.revision}: fewer drafts may be accepted"
        )
        findings.append(Finding("warning", text))
    if not config.trained:
        findings.append(Finding("warning", "the drafter is untrained: its drafts are noise"))
    return findings


def _check_fit(config: DrafterConfig, target: Target | None) -> list[Finding]:
    if target is None:
        text = "without `target`, the fit, the use of the mask id and the context are not checked"
        return [Finding("warning", text)]
    if misfits := config.misfits(target):
        return [Finding("error", f"does not fit {target.name}: {line}") for line in misfits]
    return [Finding("ok", f"fits {target.name}")]


def _check_exports(checkpoint: Checkpoint, target: Target | None, k: int) -> list[Finding]:
    """Export to both formats, read each back and compare its drafts with those of the folder."""
    if checkpoint.format == "peagle" and target is None:
        text = "drafts not compared: this format does not store all tensors, give `target`"
        return [Finding("warning", text)]
    drafter = load(checkpoint.folder, target)
    if drafter.config.aux_layer_ids is None:
        text = "drafts not compared: the aux layer ids are unknown, give `target`"
        return [Finding("warning", text)]
    try:
        subset = vllm_subset(drafter)
    except UserError as error:
        return [Finding("warning", str(error))]
    notice = subset_notice(drafter.config)
    findings = [Finding("warning", notice)] if notice else []
    return findings + [_check_export(subset, to, k) for to in EXPORT_FORMATS]


def _check_export(drafter: Drafter, to: ExportFormat, k: int) -> Finding:
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / to
        try:
            export(drafter, copy, to, k, VerifierConfig("", []))
        except UserError as error:
            return Finding("warning", f"as {to}: {error}")
        equal, total = same_drafts(drafter, load(copy, None), k)
    text = f"as {to}, reloaded: {equal} of {total} drafts identical"
    return Finding("ok" if equal == total else "error", text)
