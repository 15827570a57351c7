"""Validate a pair without a network: its folders exist and have what the entry says.

The entry itself was checked when it was read (entry.py).
"""

from pathlib import Path

from peagle.catalog.pair import DrafterSource, Pair
from peagle.core import Method
from peagle.drafter.formats.checkpoint import read
from peagle.errors import UserError
from peagle.export.check import Finding


def validate(pair: Pair) -> list[Finding]:
    findings = _check_target(pair)
    for method, source in pair.drafters.items():
        findings += _check_drafter(pair, method, source)
    requirements = ("vllm", "memory_gb", "instances")
    if unknown := [name for name in requirements if not getattr(pair.production, name)]:
        findings.append(Finding("warning", f"production: {', '.join(unknown)} unknown"))
    return findings


def _check_target(pair: Pair) -> list[Finding]:
    target = pair.target
    findings = []
    if target.folder is not None:
        if target.folder.is_file() or (target.folder / "config.json").is_file():
            findings.append(Finding("ok", f"target: {target.folder}"))
        else:
            text = f"target: {target.folder} has no target: config.json is missing"
            findings.append(Finding("error", text))
    if target.hub is not None:
        findings.append(_hub_finding("target", target.hub))
    return findings


def _hub_finding(part: str, hub_id: str) -> Finding:
    return Finding("ok", f"{part}: {hub_id} is well formed; whether it exists is not checked")


def _check_drafter(pair: Pair, method: Method, source: DrafterSource) -> list[Finding]:
    if source.folder is not None:
        return _check_drafter_folder(pair, method, source, source.folder)
    if source.hub is not None:
        return [_hub_finding(method, source.hub)]
    return [Finding("warning", f"{method}: no trained drafter yet; an untrained one drafts noise")]


def _check_drafter_folder(
    pair: Pair, method: Method, source: DrafterSource, folder: Path
) -> list[Finding]:
    try:
        checkpoint = read(folder)
    except UserError as error:
        return [Finding("error", f"{method}: {error}")]
    config = checkpoint.config
    context = pair.production.context
    comparisons = (
        ("method", method, config.method),
        ("format", source.format, checkpoint.format),
        ("depth", source.depth, config.k_trained),
    )
    errors = [
        f"the entry says {field} {in_entry}, {folder} says {in_folder}"
        for field, in_entry, in_folder in comparisons
        if None not in (in_entry, in_folder) and in_entry != in_folder
    ]
    errors += checkpoint.problems()
    if method == pair.method and config.k_trained and pair.k > config.k_trained:
        errors.append(f"K is {pair.k}, but it was trained to depth {config.k_trained}")
    if context is not None and context > config.max_position_embeddings:
        errors.append(
            f"it supports {config.max_position_embeddings} tokens, but the context is {context}"
        )
    if errors:
        return [Finding("error", f"{method}: {line}") for line in errors]
    return [Finding("ok", f"{method}: {folder} agrees with the entry")]
