import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from peagle.cli.application import CommandGroup, app, err, warn
from peagle.cli.application import out as console
from peagle.cli.deployment import options as option
from peagle.cli.options import Json, K, Method
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.deploy.plan import Plan

deploy_app = typer.Typer(cls=CommandGroup, no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(deploy_app, name="deploy")

KINDS = {
    "vllm": "a script and a config file for `vllm serve`",
    "compose": "docker compose, with Prometheus",
    "kubernetes": "Deployment, Service, volume, network policy, monitor",
    "helm": "values for the vLLM production stack's chart",
    "kserve": "an InferenceService",
    "ray": "a Ray Serve LLM application",
    "skypilot": "a SkyServe service",
}


@dataclass(frozen=True, slots=True)
class WrittenDeployment:
    """The result of a command; its fields are the keys of the JSON output."""

    kind: str
    pair: str
    name: str
    target: str
    k: int
    drafter: str
    image: str
    folder: str
    written: list[str]  # paths that are new or changed
    files: list[str]  # names of all files of the deployment
    notes: list[str]
    next: list[str]  # shell commands


@deploy_app.callback()
def deploy() -> None:
    """Write the files that start a pair elsewhere: vLLM, compose, Kubernetes, Helm, KServe, Ray,
    SkyPilot; or create a SageMaker endpoint."""


def write_deployment(
    ctx: typer.Context,
    pair: option.PairName,
    out: option.OutFolder,
    k: K = None,
    concurrency: option.Concurrency = None,
    drafter: option.FileDrafter = None,
    method: Method = None,
    gpus: option.ReplicaGpus = 1,
    gpu: option.GpuType = None,
    replicas: option.Replicas = 1,
    context: option.Context = None,
    port: option.Port = 8000,
    name: option.DeploymentName = None,
    served_model_name: option.ServedModelName = None,
    vllm: option.VllmVersion = None,
    image: option.VllmImage = None,
    learn: option.Learn = False,
    force: option.Force = False,
    as_json: Json = False,
) -> None:
    from peagle.deploy.options import DeployOptions
    from peagle.deploy.plan import plan

    kind = str(ctx.info_name)  # every kind is a command of its own
    options = DeployOptions(
        k=k,
        concurrency=concurrency,
        drafter=drafter,
        method=method,
        vllm=vllm,
        context=context,
        gpus=gpus,
        gpu=gpu,
        replicas=replicas,
        port=port,
        name=name,
        served_model_name=served_model_name,
        image=image,
        learn=learn,
    )
    written = write_plan(plan(pair, kind, options), kind, out.expanduser(), force, as_json)
    report(written, as_json)


def write_plan(plan: "Plan", kind: str, out: Path, force: bool, quiet: bool) -> WrittenDeployment:
    """Write the files of a kind and export a local drafter beside them."""
    from peagle.deploy.drafter import subset_notices
    from peagle.deploy.render import changed_files, next_steps, render, write_files

    deployment = plan.deployment
    if kind == "skypilot" and deployment.gpu is None and deployment.gpu_gb is None:
        raise UserError(
            f"the memory that {deployment.pair} needs is unknown: give a type with --gpu, like H100"
        )
    files = render(kind, deployment)
    changed = changed_files(files, out, force)
    written = [str(path) for path in changed]
    notes = [*deployment.notes]
    names = [*files]
    if plan.drafter_folder is not None:
        if export_drafter_beside(plan, plan.drafter_folder, out, force, quiet):
            written.append(str(out / "drafter"))
        if not deployment.learn:
            notes += subset_notices(plan.drafter_folder)
        names.append("drafter")
    write_files(changed)
    return WrittenDeployment(
        kind=kind,
        pair=deployment.pair,
        name=deployment.name,
        target=deployment.target,
        k=deployment.k,
        drafter=deployment.drafter,
        image=deployment.image,
        folder=str(out),
        written=written,
        files=names,
        notes=notes,
        next=next_steps(kind, deployment, out).strip().splitlines(),
    )


def export_drafter_beside(plan: "Plan", folder: Path, out: Path, force: bool, quiet: bool) -> bool:
    from peagle.deploy.drafter import copy_drafter, export_drafter
    from peagle.progress import progress_bars

    if plan.deployment.learn:
        return copy_drafter(folder, out / "drafter", force)
    with progress_bars(err, quiet=quiet) as progress:
        return export_drafter(
            folder, plan.pair, plan.deployment.k, out / "drafter", force, progress
        )


def report(written: WrittenDeployment, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(written), indent=2))
        return
    for note in written.notes:
        warn(note)
    names = ", ".join(Path(path).name for path in written.written)
    print(f"{written.folder}: {names or 'nothing new: all files are up to date'}")
    console.print("\nRun next:", style="bold")
    for line in written.next:
        console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)


for _kind, _files in KINDS.items():
    _help = f"Write {_files}.\n\nExample: peagle deploy {_kind} gpt-oss-20b --out deployed/"
    deploy_app.command(_kind, help=_help)(write_deployment)
