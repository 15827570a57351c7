from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from peagle.cli.application import app, err, out, warn
from peagle.cli.options import Json, K, Method
from peagle.errors import UserError

deploy_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(deploy_app, name="deploy")

KINDS = {
    "vllm": "a script and a config file for `vllm serve`",
    "compose": "docker compose, with Prometheus",
    "kubernetes": "Deployment, Service, volume, monitor",
    "helm": "values for the vLLM production stack's chart",
    "kserve": "an InferenceService",
    "ray": "a Ray Serve LLM application",
    "skypilot": "a SkyServe service",
}


@deploy_app.callback()
def deploy() -> None:
    """Everything that starts a pair elsewhere: files for vLLM, compose, Kubernetes, Helm, KServe, Ray, SkyPilot."""


def command(kind: str) -> Any:
    def run(
        pair: Annotated[
            str,
            typer.Argument(metavar="PAIR", help="The pair, or a target's folder (with --drafter)."),
        ],
        folder: Annotated[
            Path, typer.Option("--out", metavar="DIR", help="Where the files are written.")
        ],
        k: K = None,
        concurrency: Annotated[
            int | None,
            typer.Option(
                help="Requests at once: chooses K, where it is known.", min=1, show_default=False
            ),
        ] = None,
        drafter: Annotated[
            str | None,
            typer.Option(
                help="A hub id, or a folder: exported to DIR/drafter. Default: the pair's.",
                show_default=False,
            ),
        ] = None,
        method: Method = None,
        gpus: Annotated[int, typer.Option(help="GPUs of a replica, tensor parallel.")] = 1,
        gpu: Annotated[
            str | None, typer.Option(help="Their type, as the place calls it.", show_default=False)
        ] = None,
        replicas: Annotated[int, typer.Option(help="Replicas.")] = 1,
        context: Annotated[
            int | None, typer.Option(help="Tokens of a prompt and its answer.", show_default=False)
        ] = None,
        port: Annotated[int, typer.Option(help="The port of the endpoint.")] = 8000,
        name: Annotated[
            str | None,
            typer.Option(help="Of what is made. Default: peagle-PAIR.", show_default=False),
        ] = None,
        served: Annotated[
            str | None,
            typer.Option("--served-model-name", help="What requests call it.", show_default=False),
        ] = None,
        vllm: Annotated[
            str | None, typer.Option(help="vLLM's version.", show_default=False)
        ] = None,
        image: Annotated[
            str | None,
            typer.Option(
                help="An image with vLLM, instead of vllm/vllm-openai.", show_default=False
            ),
        ] = None,
        force: Annotated[bool, typer.Option("--force", help="Replace files that differ.")] = False,
        as_json: Json = False,
    ) -> None:
        choices = {"name": name, "served_name": served, "gpu": gpu, "image_name": image}
        made = {key: value for key, value in choices.items() if value is not None}
        write(
            kind,
            folder,
            force,
            as_json,
            name=pair,
            k=k,
            concurrency=concurrency,
            drafter=drafter,
            method=method,
            vllm=vllm,
            context=context,
            choices=made | {"gpus": gpus, "replicas": replicas, "port": port},
        )

    return run


def write(
    kind: str, folder: Path, force: bool, as_json: bool, choices: dict[str, Any], **asked: Any
) -> None:
    from peagle.deploy.drafter import export_drafter, lost
    from peagle.deploy.plan import plan
    from peagle.deploy.render import differing, next_steps, render
    from peagle.deploy.render import write as place
    from peagle.progress import progress_bars

    folder = folder.expanduser()
    planned = plan(kind=kind, choices=choices, **asked)
    made = planned.deployment
    if kind == "skypilot" and made.gpu is None and made.gpu_gb is None:
        raise UserError(
            f"the memory {made.pair} needs is unknown: give a type with --gpu, like H100"
        )
    files = render(kind, made)
    changed = differing(files, folder, force)
    written = [str(path) for path in changed]
    if planned.drafter is not None:
        with progress_bars(err, quiet=as_json) as progress:
            if export_drafter(
                planned.drafter, planned.pair, made.k, folder / "drafter", force, progress
            ):
                written.append(str(folder / "drafter"))
    notes = [*made.notes, *(lost(planned.drafter) if planned.drafter is not None else [])]
    place(changed)
    steps = next_steps(kind, made, folder).strip()
    report(
        as_json,
        {
            "kind": kind,
            "pair": made.pair,
            "name": made.name,
            "target": made.target,
            "k": made.k,
            "drafter": made.drafter,
            "image": made.image,
            "folder": str(folder),
            "written": written,
            "files": [*files, *(["drafter"] if planned.drafter else [])],
            "notes": notes,
            "next": steps.splitlines(),
        },
    )


def report(as_json: bool, said: dict[str, Any]) -> None:
    if as_json:
        import json

        print(json.dumps(said, indent=2))
        return
    for note in said["notes"]:
        warn(note)
    written = (
        ", ".join(Path(path).name for path in said["written"]) or "nothing new: all is as it was"
    )
    print(f"{said['folder']}: {written}")
    out.print("\nRun next:", style="bold")
    for line in said["next"]:
        out.print(f"  {escape(line)}", highlight=False, soft_wrap=True)


for _kind, _what in KINDS.items():
    _help = f"Write {_what}.\n\nExample: peagle deploy {_kind} gpt-oss-20b --out deployed/"
    deploy_app.command(_kind, help=_help)(command(_kind))
