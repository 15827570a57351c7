"""From a pair and what was asked for to a Deployment, and the drafter's folder where it has to be exported first."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.catalog import find_pair
from peagle.catalog.entry import HUB_ID
from peagle.catalog.pair import DrafterSource, Pair
from peagle.core import Method, check_k, parse_method
from peagle.deploy.spec import DRAFTER_MOUNT, TARGET_MOUNT, Deployment
from peagle.deploy.version import RAYS, TESTED, choose_version, samples_wrongly
from peagle.errors import UserError

UNTRAINED = "this drafter is untrained: its drafts are noise"
LONG = 10_000  # tokens beyond which a drafter for long contexts is taken, where there is one


@dataclass(frozen=True, slots=True)
class Plan:
    pair: Pair
    deployment: Deployment
    drafter: Path | None  # a folder to export; None: the drafter is on the hub


@dataclass(frozen=True, slots=True)
class Drafter:
    method: Method
    place: str | Path  # a hub id, or a folder
    depth: int | None
    trained: bool = True


def plan(
    name: str,
    kind: str,
    k: int | None = None,
    concurrency: int | None = None,
    drafter: str | None = None,
    method: str | None = None,
    vllm: str | None = None,
    context: int | None = None,
    choices: Mapping[str, Any] | None = None,
) -> Plan:
    """`choices`: the other fields of a Deployment."""
    pair = find_pair(name)
    told = pair.production
    context = told.context if context is None else context
    wanted = parse_method(method) if method else None
    chosen = given_drafter(pair, drafter, wanted) if drafter else own_drafter(pair, context, wanted)
    version = choose_version(
        vllm, told.vllm, chosen.method, pair.name, RAYS if kind == "ray" else TESTED
    )
    drafted, notes = choose_k(pair, chosen, k, concurrency)
    folder = chosen.place if isinstance(chosen.place, Path) else None
    target, target_folder = target_of(pair)
    deployment = Deployment(
        pair=Path(pair.name).resolve().name if target_folder else pair.name,
        target=target,
        target_folder=target_folder,
        drafter=DRAFTER_MOUNT if folder else str(chosen.place),
        local_drafter=folder is not None,
        method=chosen.method,
        k=drafted,
        vllm=version,
        context=context,
        flags=told.flags,
        weights_gb=told.memory.weights_gb,
        need_gb=told.memory.need_gb(context),
        notes=(*([] if chosen.trained else [UNTRAINED]), *notes, *version_notes(pair, version)),
        **(choices or {}),
    )
    return Plan(pair, deployment, folder)


def target_of(pair: Pair) -> tuple[str, str | None]:
    """What vLLM finds the target by, and the folder on this machine that is mounted there."""
    if pair.target.folder is not None:
        return TARGET_MOUNT, str(pair.target.folder.resolve())
    if pair.target.hub is None:
        raise UserError(
            f"the target of {pair.name!r} is not on the hub: `peagle pull` it, and deploy its folder"
        )
    return pair.target.hub, None


def own_drafter(pair: Pair, context: int | None, wanted: Method | None) -> Drafter:
    method = wanted or pair.method
    if method == "none":
        raise UserError("without a drafter there is no pair: give one with --drafter HUB_ID or DIR")
    source = pair.drafter(method)
    if not source.trained:
        raise UserError(
            f"pair {pair.name!r} has no trained drafter yet: give one with --drafter HUB_ID or DIR"
        )
    return Drafter(method, place_of(source, context), source.depth)


def place_of(source: DrafterSource, context: int | None) -> str | Path:
    if source.long_context and context and context > LONG:
        return source.long_context
    return source.folder or str(source.hub)


def given_drafter(pair: Pair, word: str, wanted: Method | None) -> Drafter:
    """A folder tells its own method and depth; a hub id is passed through as of the method wanted, or the pair's."""
    folder = Path(word).expanduser()
    if folder.is_dir():
        from peagle.drafter.formats.checkpoint import read

        config = read(folder).config
        if wanted not in (None, config.method):
            raise UserError(f"{word} holds a {config.method} drafter, not {wanted}: drop --method")
        return Drafter(config.method, folder.resolve(), config.k_trained, config.trained)
    if not HUB_ID.fullmatch(word):
        raise UserError(f"--drafter {word!r} is neither a folder nor a hub id (ORG/NAME)")
    known = {source.hub: (method, source.depth) for method, source in pair.drafters.items()}
    method, depth = known.get(word, (wanted or pair.method, None))
    return Drafter("p-eagle" if method == "none" else method, word, depth)


def choose_k(
    pair: Pair, drafter: Drafter, k: int | None, concurrency: int | None
) -> tuple[int, list[str]]:
    """--k, else what was published for that load, else the pair's own; never deeper than the drafter was trained."""
    notes = []
    best = pair.production.best_k(concurrency) if concurrency is not None else None
    if concurrency is not None and best is None and k is None:
        notes.append(f"the best K at {concurrency} requests is unknown: {pair.k} is the pair's own")
    chosen = check_k(next(number for number in (k, best, pair.k) if number is not None))
    if drafter.depth is None or chosen <= drafter.depth:
        return chosen, notes
    if k is not None:
        raise UserError(
            f"K is {k}, but the drafter was trained to depth {drafter.depth}: use -k {drafter.depth}"
        )
    return drafter.depth, [*notes, f"K is {drafter.depth}: deeper the drafter was not trained"]


def version_notes(pair: Pair, version: str) -> list[str]:
    notes = []
    if pair.production.vllm is None:
        notes.append(
            f"the first vLLM that serves this pair is unknown: {version} was not tried with it"
        )
    if samples_wrongly(version):
        notes.append(
            f"vLLM {version} verifies drafts wrongly at temperatures above 0: 0.25 or later does it right"
        )
    return notes
