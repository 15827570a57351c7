"""Plan: the Deployment of a pair under given options, and the drafter folder to export."""

from dataclasses import dataclass
from pathlib import Path

from peagle.catalog import find_pair
from peagle.catalog.catalog import is_gguf_file
from peagle.catalog.entry import HUB_ID
from peagle.catalog.pair import DrafterSource, Pair
from peagle.core import DRAFTER_METHODS, Method, check_k, parse_method
from peagle.deploy.options import DeployOptions
from peagle.deploy.spec import LEARN_KINDS, MODEL_MOUNT, NATIVE_MOUNT, Deployment
from peagle.deploy.version import RAY_VLLM, TESTED_VLLM, choose_version, samples_incorrectly
from peagle.errors import UserError

UNTRAINED_NOTE = "this drafter is untrained: its drafts are noise"
LONG_CONTEXT_TOKENS = 10_000  # above this context, the long-context drafter is used if there is one


@dataclass(frozen=True, slots=True)
class Plan:
    pair: Pair
    deployment: Deployment
    drafter_folder: Path | None  # the folder to export; None: the drafter is on the hub


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    method: Method
    location: str | Path  # a hub id, or a folder
    depth: int | None  # K in training; None: unknown
    trained: bool = True


def plan(name: str, kind: str, options: DeployOptions | None = None) -> Plan:
    """Plan the deployment of the pair `name` to the platform `kind`."""
    options = options or DeployOptions()
    if options.learn and kind not in LEARN_KINDS:
        raise UserError(f"`learn` is not supported by {kind}: use {' or '.join(LEARN_KINDS)}")
    mount = NATIVE_MOUNT if options.learn else MODEL_MOUNT
    pair = find_pair(name)
    target, target_folder = target_location(pair, mount)
    if options.learn and target_folder is None:
        target = pair.name  # `peagle serve` knows the pair.
    production = pair.production
    context = production.context if options.context is None else options.context
    drafter = choose_drafter(pair, options, context)
    version = choose_version(
        options.vllm,
        production.vllm,
        drafter.method,
        pair.name,
        RAY_VLLM if kind == "ray" else TESTED_VLLM,
    )
    k, k_notes = choose_k(pair, drafter, options.k, options.concurrency)
    untrained_notes = () if drafter.trained else (UNTRAINED_NOTE,)
    folder = drafter.location if isinstance(drafter.location, Path) else None
    if options.learn:
        folder = learn_folder(options, folder)
    deployment = Deployment(
        pair=Path(pair.name).resolve().name if target_folder else pair.name,
        target=target,
        target_folder=target_folder,
        drafter=f"{mount}/drafter" if folder else str(drafter.location),
        local_drafter=folder is not None,
        method=drafter.method,
        k=k,
        vllm=version,
        context=context,
        gpus=options.gpus,
        gpu=options.gpu,
        replicas=options.replicas,
        port=options.port,
        name=options.name or "",
        served_model_name=options.served_model_name or "",
        custom_image=options.image,
        learn=options.learn,
        flags=production.flags,
        weights_gb=production.memory.weights_gb,
        need_gb=production.memory.need_gb(context),
        notes=(*untrained_notes, *k_notes, *version_notes(pair, version)),
    )
    return Plan(pair, deployment, folder)


def learn_folder(options: DeployOptions, folder: Path | None) -> Path | None:
    """The drafter to copy for `peagle serve`; None: the image has the pair's own."""
    if options.drafter is None:
        return None
    if folder is None:
        raise UserError(f"`drafter` {options.drafter!r} must be a folder with `learn`: download it")
    return folder


def target_location(pair: Pair, mount: str) -> tuple[str, str | None]:
    """(name of the target for the server, folder of this machine that is mounted there)."""
    if pair.target.folder is not None:
        if is_gguf_file(pair.target.folder):
            raise UserError(
                f"{pair.name} is a GGUF file, which is not deployed: give the folder or the hub id"
                " of the same model with config.json and safetensors"
            )
        return f"{mount}/target", str(pair.target.folder.resolve())
    if pair.target.hub is None:
        raise UserError(
            f"the target of {pair.name!r} is not on the hub:"
            " fetch it with `peagle pull` and deploy its folder"
        )
    return pair.target.hub, None


def choose_drafter(pair: Pair, options: DeployOptions, context: int | None) -> DrafterChoice:
    method = parse_method(options.method) if options.method else None
    if options.drafter:
        return requested_drafter(pair, options.drafter, method)
    return default_drafter(pair, context, method)


def default_drafter(pair: Pair, context: int | None, method: Method | None) -> DrafterChoice:
    """The pair's own drafter of the requested method, else of the pair's method."""
    method = method or pair.method
    if method not in DRAFTER_METHODS:
        raise UserError(
            "a deployment needs a drafter: give one with `drafter`, a hub id or a folder"
        )
    source = pair.drafter(method)
    if not source.trained:
        raise UserError(
            f"pair {pair.name!r} has no trained drafter yet:"
            " give one with `drafter`, a hub id or a folder"
        )
    return DrafterChoice(method, drafter_location(source, context), source.depth)


def drafter_location(source: DrafterSource, context: int | None) -> str | Path:
    if source.long_context and context and context > LONG_CONTEXT_TOKENS:
        return source.long_context
    return source.folder or str(source.hub)


def requested_drafter(pair: Pair, drafter: str, method: Method | None) -> DrafterChoice:
    """A folder or a hub id in place of the pair's drafter.

    The config in a folder states method and depth. A hub id has the requested method, else that
    of the pair.
    """
    folder = Path(drafter).expanduser()
    if folder.is_dir():
        from peagle.drafter.formats.checkpoint import read

        config = read(folder).config
        if method not in (None, config.method):
            raise UserError(
                f"{drafter} holds a {config.method} drafter, not {method}: omit `method`"
            )
        return DrafterChoice(config.method, folder.resolve(), config.k_trained, config.trained)
    if not HUB_ID.fullmatch(drafter):
        raise UserError(f"`drafter` {drafter!r} is neither a folder nor a hub id (ORG/NAME)")
    known = {source.hub: (name, source.depth) for name, source in pair.drafters.items()}
    hub_method, depth = known.get(drafter, (method or pair.method, None))
    return DrafterChoice("p-eagle" if hub_method == "none" else hub_method, drafter, depth)


def choose_k(
    pair: Pair, drafter: DrafterChoice, k: int | None, concurrency: int | None
) -> tuple[int, list[str]]:
    """K and notes about it: `k`, else the published K for the load, else the pair's.

    K is never larger than the depth to which the drafter was trained.
    """
    notes = []
    best = pair.production.best_k(concurrency) if concurrency is not None else None
    if concurrency is not None and best is None and k is None:
        notes.append(f"the best K at {concurrency} requests is unknown: {pair.k} is the pair's own")
    chosen = check_k(next(number for number in (k, best, pair.k) if number is not None))
    if drafter.depth is None or chosen <= drafter.depth:
        return chosen, notes
    if k is not None:
        raise UserError(
            f"K is {k}, but the drafter was trained to depth {drafter.depth}:"
            f" lower `k` to {drafter.depth}"
        )
    return drafter.depth, [*notes, f"K is {drafter.depth}: deeper the drafter was not trained"]


def version_notes(pair: Pair, version: str) -> list[str]:
    notes = []
    if pair.production.vllm is None:
        notes.append(
            f"the first vLLM that serves this pair is unknown: {version} was not tried with it"
        )
    if samples_incorrectly(version):
        notes.append(
            f"vLLM {version} verifies drafts wrongly at temperatures above 0:"
            " 0.25 or later does it right"
        )
    return notes
