"""What can be said about a pair without a network: its folders are there, and hold what the entry says."""

from pathlib import Path

from peagle.catalog.pair import DrafterSource, Pair
from peagle.core import Method
from peagle.drafter.formats.checkpoint import read
from peagle.errors import UserError
from peagle.export.check import Finding


def validate(pair: Pair) -> list[Finding]:
    """The entry itself was checked when it was read."""
    findings = _target(pair)
    for method, source in pair.drafters.items():
        findings += _drafter(pair, method, source)
    unknown = [
        name for name in ("vllm", "memory_gb", "instances") if not getattr(pair.production, name)
    ]
    if unknown:
        findings.append(Finding("warning", f"production: {', '.join(unknown)} unknown"))
    return findings


def _target(pair: Pair) -> list[Finding]:
    target = pair.target
    found = []
    if target.folder is not None:
        there = (target.folder / "config.json").is_file()
        text = f"target: {target.folder}" + (
            "" if there else " holds no target: config.json is missing"
        )
        found.append(Finding("ok" if there else "error", text))
    if target.hub is not None:
        found.append(
            Finding(
                "ok", f"target: {target.hub} is well formed; whether the hub has it is not asked"
            )
        )
    return found


def _drafter(pair: Pair, method: Method, source: DrafterSource) -> list[Finding]:
    if source.folder is not None:
        return _folder(pair, method, source, source.folder)
    if source.hub is not None:
        return [
            Finding(
                "ok", f"{method}: {source.hub} is well formed; whether the hub has it is not asked"
            )
        ]
    return [Finding("warning", f"{method}: no trained drafter yet; an untrained one drafts noise")]


def _folder(pair: Pair, method: Method, source: DrafterSource, folder: Path) -> list[Finding]:
    try:
        found = read(folder)
    except UserError as error:
        return [Finding("error", f"{method}: {error}")]
    config, context = found.config, pair.production.context
    said = (
        ("method", method, config.method),
        ("format", source.format, found.format),
        ("depth", source.depth, config.k_trained),
    )
    errors = [
        f"{method}: the entry says {key} {told}, {folder} says {true}"
        for key, told, true in said
        if None not in (told, true) and told != true
    ]
    errors += [f"{method}: {line}" for line in found.problems()]
    if method == pair.method and config.k_trained and pair.k > config.k_trained:
        errors.append(f"{method}: K is {pair.k}, but it was trained to depth {config.k_trained}")
    if context is not None and context > config.max_position_embeddings:
        errors.append(
            f"{method}: made for {config.max_position_embeddings} tokens, the context is {context}"
        )
    return [Finding("error", line) for line in errors] or [
        Finding("ok", f"{method}: {folder} is what the entry says")
    ]
