"""`peagle check`: what is wrong with a drafter folder, before a server finds out or, worse, does not."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peagle.drafter.config import DrafterConfig
from peagle.drafter.formats import checkpoint, vllm
from peagle.drafter.formats.checkpoint import Checkpoint
from peagle.errors import UserError
from peagle.export import export
from peagle.export.vllm_subset import notice, vllm_subset
from peagle.target import Target

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    text: str


def check(folder: Path, target: Target | None = None, k: int = 7) -> list[Finding]:
    """Every finding, errors included; only a folder that cannot be read at all raises."""
    read = checkpoint.read(folder)
    config = read.config
    findings = [Finding("ok", f"{read.format} format, {config.method}, {config.num_layers} layers")]
    findings += [Finding("error", line) for line in read.problems()]
    findings += (
        _identity_d2t(read) + _aux_ids(read) + _mask(read, target) + _context(config, target)
    )
    if target is not None and config.target_revision not in (None, target.revision):
        text = f"trained on revision {config.target_revision}, the target here is {target.revision}: expect less"
        findings.append(Finding("warning", text))
    if not config.trained:
        findings.append(Finding("warning", "it is untrained: its drafts are noise"))
    if target is None:
        text = "without --target: whether it fits, whether the mask id is free and the context are not checked"
        findings.append(Finding("warning", text))
    else:
        misfits = [
            Finding("error", f"does not fit {target.name}: {line}")
            for line in config.misfits(target)
        ]
        findings += misfits or [Finding("ok", f"fits {target.name}")]
    if any(finding.level == "error" for finding in findings):
        return findings
    return findings + _same_after_reload(read, target, k)


def _identity_d2t(read: Checkpoint) -> list[Finding]:
    if read.format != "peagle" and not read.config.pruned and "d2t" in read.stored:
        return [
            Finding(
                "warning",
                "d2t beside a full vocabulary: vLLM 0.32.0 fails to load it. `peagle export` drops it",
            )
        ]
    return []


def _aux_ids(read: Checkpoint) -> list[Finding]:
    ids = read.config.aux_layer_ids
    if ids is None:
        where = "eagle_config." if read.format == "vllm" else ""
        key = f"{where}eagle_aux_hidden_state_layer_ids"
        text = f"no aux layer ids: vLLM guesses (2, L//2, L-3) without a word. Write them as {key}"
        return [Finding("warning" if read.config.num_taps == 3 else "error", text)]
    return [Finding("ok", f"aux layer ids {list(ids)}")]


def _mask(read: Checkpoint, target: Target | None) -> list[Finding]:
    config, found = read.config, []
    if config.method != "p-eagle":
        return []
    spelt = {key: read.raw[key] for key in vllm.MASK_KEYS if read.raw.get(key) is not None}
    if len(set(map(int, spelt.values()))) > 1:
        found.append(
            Finding(
                "error", f"the mask id is spelt in different ways: {spelt}. Give all the same value"
            )
        )
    if read.format == "vllm" and not {"pard_token", "ptd_token_id"} <= spelt.keys():
        text = f"mask id only as {', '.join(spelt)}: vLLM 0.16 to 0.27 look for pard_token or ptd_token_id"
        found.append(
            Finding("warning" if {"pard_token", "ptd_token_id"} & spelt.keys() else "error", text)
        )
    if target is not None and (why := used_token(target, config.mask_token_id or 0)):
        found.append(
            Finding(
                "error", f"mask id {config.mask_token_id} is {why}: choose an unused vocabulary row"
            )
        )
    return found or [Finding("ok", f"mask id {config.mask_token_id}")]


def used_token(target: Target, token_id: int) -> str | None:
    """What the target uses this id for, or None for a row that never occurs in text."""
    if token_id in target.stop_ids:
        return "a stop token of the target"
    if target.tokenizer is None:
        return None
    text = target.tokenizer.convert_ids_to_tokens(token_id)
    if text is None:
        return None
    if (
        token_id not in target.tokenizer.all_special_ids
        and token_id not in target.tokenizer.added_tokens_decoder
    ):
        return f"the ordinary token {text!r}"
    template = target.tokenizer.chat_template or ""
    return f"{text!r}, which the chat template writes" if text in template else None


def _context(config: DrafterConfig, target: Target | None) -> list[Finding]:
    if target is not None and config.max_position_embeddings < target.context:
        return [
            Finding(
                "error",
                f"max_position_embeddings is {config.max_position_embeddings}, the target's {target.context}:"
                " acceptance breaks down beyond it. Copy the target's value",
            )
        ]
    if target is None and config.max_position_embeddings <= 2048:
        text = f"max_position_embeddings is only {config.max_position_embeddings}: is that the target's?"
        return [Finding("warning", text)]
    return [Finding("ok", f"context {config.max_position_embeddings}")]


def _same_after_reload(read: Checkpoint, target: Target | None, k: int) -> list[Finding]:
    """Exports to both formats, reads each back and compares drafts with those of the folder itself."""
    if read.format == "peagle" and target is None:
        return [
            Finding(
                "warning",
                "drafts not compared: this format leaves tensors to its target, give --target",
            )
        ]
    drafter = checkpoint.load(read.folder, target)
    if drafter.config.aux_layer_ids is None:
        return [
            Finding(
                "warning",
                "drafts not compared with an export: give --target to settle the aux layer ids",
            )
        ]
    try:
        plain = vllm_subset(drafter)
    except UserError as error:
        return [Finding("warning", str(error))]
    findings = [Finding("warning", lost)] if (lost := notice(drafter.config)) else []
    formats: tuple[export.ExportFormat, ...] = ("vllm", "speculators")
    for to in formats:
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / to
            try:
                export.export(plain, copy, to, k, {"name_or_path": "", "architectures": []})
            except UserError as error:
                findings.append(Finding("warning", f"as {to}: {error}"))
                continue
            same, total = export.same_drafts(plain, checkpoint.load(copy, None), k)
            findings.append(
                Finding(
                    "ok" if same == total else "error",
                    f"as {to}, reloaded: {same} of {total} drafts identical",
                )
            )
    return findings
